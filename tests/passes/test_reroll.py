"""reroll: loops over pieces of rows and tokens are one computation; others stay, and the numbers are eager's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from longstraw.errors import LongstrawError, MixesRows, MixesTokens
from longstraw.passes.reroll import reroll
from longstraw.runtime.spans import Runner
from tests.small import Tiny, assert_same, gradients, inputs, records
from tests.sweeps import sweep

PROMPT, RESPONSE, ROWS = 9, 6, 3
Logp = Callable[[Tensor, Tensor], Tensor]


def selected(logits: Tensor, tokens: Tensor) -> Tensor:
    return torch.log_softmax(logits, -1).gather(-1, tokens[..., None]).squeeze(-1)


def step_with(logp: Logp) -> Callable[..., Tensor]:
    """A step whose log-probabilities `[G, R]` are computed by a function of `logits [G, R, V]` and the responses."""

    def step(model: nn.Module, prompt: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
        ids = torch.cat([prompt.expand(responses.shape[0], -1), responses], 1)
        return (logp(model(ids)[:, prompt.shape[1] - 1 : -1], responses) * weights).sum()

    return step


def by_zip(logits: Tensor, responses: Tensor) -> Tensor:
    return torch.stack([selected(x, y) for x, y in zip(logits, responses, strict=True)])


def by_index(logits: Tensor, responses: Tensor) -> Tensor:
    return torch.stack([selected(logits[i], responses[i]) for i in range(logits.shape[0])])


def by_negative_index(logits: Tensor, responses: Tensor) -> Tensor:
    count = logits.shape[0]
    return torch.stack([selected(logits[i - count], responses[i]) for i in range(count)])


def by_range(logits: Tensor, responses: Tensor) -> Tensor:
    return torch.cat([selected(logits[i : i + 1], y[None]) for i, y in enumerate(responses)])


def by_ranges_of_two(logits: Tensor, responses: Tensor) -> Tensor:
    starts = range(0, logits.shape[0], 2)
    return torch.cat([selected(logits[i : i + 2], responses[i : i + 2]) for i in starts])


def by_split(logits: Tensor, responses: Tensor) -> Tensor:
    return torch.cat([selected(x, y) for x, y in zip(logits.split(1), responses.split(1), strict=True)])


def by_sizes(logits: Tensor, responses: Tensor) -> Tensor:
    return torch.cat([selected(x, y) for x, y in zip(logits.split([1, 2]), responses.split([1, 2]), strict=True)])


def by_chunk(logits: Tensor, responses: Tensor) -> Tensor:
    return torch.cat([selected(x, y) for x, y in zip(logits.chunk(2, 0), responses.chunk(2, 0), strict=True)])


def by_chunk_of_tokens(logits: Tensor, responses: Tensor) -> Tensor:
    return torch.cat([selected(x, y) for x, y in zip(logits.chunk(3, 1), responses.chunk(3, 1), strict=True)], 1)


def by_flat_chunk(logits: Tensor, responses: Tensor) -> Tensor:
    pieces = zip(logits.reshape(-1, logits.shape[-1]).split(4), responses.reshape(-1).split(4), strict=True)
    return torch.cat([-F.cross_entropy(x, y, reduction="none") for x, y in pieces]).view_as(responses)


def by_one_flat_chunk(logits: Tensor, responses: Tensor) -> Tensor:
    pieces = zip(logits.flatten(0, 1).split(128), responses.flatten().split(128), strict=True)
    return torch.cat([selected(x, y) for x, y in pieces]).view_as(responses)


def by_cross_entropy(logits: Tensor, responses: Tensor) -> Tensor:
    return -torch.stack([F.cross_entropy(x, y, reduction="none") for x, y in zip(logits, responses, strict=True)])


def by_cross_entropy_of_flat_chunks(logits: Tensor, responses: Tensor) -> Tensor:
    found = []
    for x, y in zip(logits.chunk(2), responses.chunk(2), strict=True):
        found.append(-F.cross_entropy(x.reshape(-1, x.shape[-1]), y.reshape(-1), reduction="none").view(y.shape))
    return torch.cat(found)


def by_largest(logits: Tensor, responses: Tensor) -> Tensor:
    """An op with two results, and two lists from one loop."""
    logp, gaps = [], []
    for x, y in zip(logits, responses, strict=True):
        largest, place = x.max(-1)
        logp.append(selected(x / 0.7, y))
        gaps.append(largest * (place != y))
    return torch.stack(logp) - torch.stack(gaps)


def by_transposed(logits: Tensor, responses: Tensor) -> Tensor:
    return torch.stack(
        [x.t().softmax(0).t().gather(1, y.unsqueeze(1)).squeeze() for x, y in zip(logits, responses, strict=True)]
    )


def by_entropy(logits: Tensor, responses: Tensor) -> Tensor:
    """An inner loop over tokens, and values that every row reads."""
    scale = torch.linspace(0.5, 1, logits.shape[-1], dtype=logits.dtype)
    found = []
    for x, y in zip(logits, responses, strict=True):
        pieces = []
        for piece in (x * scale).split(2):
            logs = F.log_softmax(piece, dim=-1)
            pieces.append(-(torch.exp(logs) * logs).sum(-1))
        found.append(torch.cat(pieces) + selected(x, y))
    return torch.stack(found)


def by_temperature(logits: Tensor, responses: Tensor) -> Tensor:
    """A number for each row."""
    heat = responses.double().mean(1) / 20 + 0.5
    return torch.stack([selected(x / heat[i], y) for i, (x, y) in enumerate(zip(logits, responses, strict=True))])


def by_detached(logits: Tensor, responses: Tensor) -> Tensor:
    with torch.no_grad():
        old = torch.stack([selected(x, y) for x, y in zip(logits, responses, strict=True)])
    return (by_zip(logits, responses) - old).exp()


LOOPS = [
    by_zip, by_index, by_negative_index, by_range, by_ranges_of_two, by_split, by_sizes, by_chunk, by_chunk_of_tokens,
    by_flat_chunk, by_one_flat_chunk, by_cross_entropy, by_cross_entropy_of_flat_chunks, by_largest, by_transposed,
    by_entropy, by_temperature, by_detached,
]  # fmt: skip


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Tokens and number of rows of every span that is run with autograd."""
    spans: list[tuple[int, int, int]] = []
    record = Runner.record

    def noted(self, where, *args, **kwargs):
        spans.append((where.lo, where.hi, len(where.rows)))
        return record(self, where, *args, **kwargs)

    monkeypatch.setattr(Runner, "record", noted)
    return spans


@pytest.mark.parametrize("logp", LOOPS, ids=lambda logp: logp.__name__)
def test_loop_equals_eager_and_shares_the_prompt(logp: Logp, recorded: list) -> None:
    given = inputs(PROMPT, RESPONSE, ROWS)
    torch._dynamo.reset()
    assert_same(Tiny(), *given, function=step_with(selected))
    expected = list(recorded)
    recorded.clear()
    torch._dynamo.reset()
    assert_same(Tiny(), *given, function=step_with(logp))
    assert recorded == expected


@pytest.mark.parametrize("rows", sweep([1, 2, 4, 8], always=[1, 8]))
@pytest.mark.parametrize("logp", [by_zip, by_range, by_split, by_ranges_of_two], ids=lambda logp: logp.__name__)
def test_loops_of_several_lengths(logp: Logp, rows: int) -> None:
    torch._dynamo.reset()
    assert_same(Tiny(), *inputs(PROMPT, RESPONSE, rows), function=step_with(logp))


def test_one_compiled_loop_takes_other_lengths() -> None:
    torch._dynamo.reset()
    step, model = step_with(by_zip), Tiny()
    compiled = torch.compile(step, backend="longstraw")
    for prompt, response, rows in ((9, 6, 3), (12, 4, 3), (7, 5, 2)):
        given = inputs(prompt, response, rows)
        expected, eager = gradients(step, model, *given)
        eager = {name: grad.clone() for name, grad in eager.items()}
        found, ours = gradients(compiled, model, *given)
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(ours, eager, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("bits", [16, 64])
def test_selective_log_softmax_of_trl(bits: int) -> None:
    """It loops in another way over numbers of 16 bits, for which float64 is the measure."""
    from trl.trainer.utils import selective_log_softmax

    def logp(logits: Tensor, responses: Tensor) -> Tensor:
        found = selective_log_softmax(logits.bfloat16() if bits == 16 else logits, responses)
        return found.to(logits.dtype)

    torch._dynamo.reset()
    if bits == 64:
        assert_same(Tiny(), *inputs(PROMPT, RESPONSE, ROWS), function=step_with(logp))
        return
    given, model = inputs(PROMPT, RESPONSE, ROWS), Tiny()
    _, exact = gradients(step_with(selected), model, *given)
    exact = torch.cat([grad.flatten() for grad in exact.values()])
    errors = []
    for function in (step_with(logp), torch.compile(step_with(logp), backend="longstraw")):
        _, found = gradients(function, model, *given)
        errors.append((torch.cat([grad.flatten() for grad in found.values()]) - exact).norm() / exact.norm())
    assert errors[0] > 1e-4, "the step rounds"
    assert errors[1] <= 1.1 * errors[0]


@pytest.mark.parametrize("size", [5, 128])
def test_entropy_from_logits_of_trl(size: int) -> None:
    from trl.trainer.utils import entropy_from_logits

    torch._dynamo.reset()
    step = step_with(lambda logits, responses: entropy_from_logits(logits, chunk_size=size))
    assert_same(Tiny(), *inputs(PROMPT, RESPONSE, ROWS), function=step)


def test_losses_of_rows() -> None:
    """What a loop makes of a row may be one number; the loop may apply the head, too."""

    def step(model: nn.Module, prompt: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
        ids = torch.cat([prompt.expand(responses.shape[0], -1), responses], 1)
        hidden = model.hidden(ids)[:, prompt.shape[1] - 1 : -1]
        rows = zip(hidden, responses, weights, strict=True)
        return torch.stack([(selected(model.head(x), y) * w).sum() / w.abs().mean() for x, y, w in rows]).mean()

    torch._dynamo.reset()
    assert_same(Tiny(), *inputs(PROMPT, RESPONSE, ROWS), function=step)


def test_a_loop_under_autocast_keeps_its_modes() -> None:
    def step(model: nn.Module, prompt: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
        ids = torch.cat([prompt.expand(responses.shape[0], -1), responses], 1)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(ids)[:, prompt.shape[1] - 1 : -1]
            logp = torch.stack([selected(x, y) for x, y in zip(logits, responses, strict=True)])
        return (logp * weights).sum()

    model, given = Tiny().float(), inputs(PROMPT, RESPONSE, ROWS)
    torch._dynamo.reset()
    graph = records(step, model, *given)["normalise"].module.graph
    (softmax,) = graph.find_nodes(op="call_function", target=torch.ops.aten.log_softmax.int)
    assert softmax.meta["autocast"] == (("cpu", True, torch.bfloat16),)
    assert softmax.meta["val"].dtype == torch.bfloat16, "the logits' under autocast"
    assert "selected" in softmax.meta["stack_trace"]


# --- loops that are not over all pieces in their order, or not the same for each ---


def another_order(logits: Tensor, responses: Tensor) -> Tensor:
    return torch.stack([selected(logits[i], responses[i]) for i in (2, 0, 1)])


def some_rows(logits: Tensor, responses: Tensor) -> Tensor:
    return torch.stack([selected(logits[i], responses[i]) for i in (0, 1)]).repeat(2, 1)[:3]


def a_row_twice(logits: Tensor, responses: Tensor) -> Tensor:
    return torch.stack([selected(logits[i], responses[i]) for i in (0, 1, 1)])


def the_next_row(logits: Tensor, responses: Tensor) -> Tensor:
    return torch.stack([selected(logits[i], responses[i]) + logits[(i + 1) % 3].sum(-1) for i in range(3)])


def the_first_row(logits: Tensor, responses: Tensor) -> Tensor:
    return torch.stack([selected(logits[i], responses[i]) * logits[0].mean(-1) for i in range(3)])


def the_row_before(logits: Tensor, responses: Tensor) -> Tensor:
    before, found = logits[0], []
    for x, y in zip(logits, responses, strict=True):
        found.append(selected(x + before, y))
        before = x
    return torch.stack(found)


def other_temperatures(logits: Tensor, responses: Tensor) -> Tensor:
    return torch.stack([selected(logits[i] / heat, responses[i]) for i, heat in enumerate((1.0, 2.0, 1.0))])


def another_op(logits: Tensor, responses: Tensor) -> Tensor:
    ops = (torch.exp, torch.tanh, torch.exp)
    return torch.stack([op(selected(x, y)) for op, x, y in zip(ops, logits, responses, strict=True)])


def operands_swapped(logits: Tensor, responses: Tensor) -> Tensor:
    found = []
    for i, x in enumerate(logits):
        a, b = selected(x, responses[i]), x.logsumexp(-1)
        found.append(b - a if i == 1 else a - b)
    return torch.stack(found)


def softmax_over_rows(logits: Tensor, responses: Tensor) -> Tensor:
    pieces = zip(logits.split([1, 2]), responses.split([1, 2]), strict=True)
    return torch.cat([selected(x.softmax(0), y) for x, y in pieces])


def ranges_that_overlap(logits: Tensor, responses: Tensor) -> Tensor:
    pieces = [selected(logits[i : i + 2], responses[i : i + 2]) for i in (0, 1)]
    return torch.cat(pieces)[:3]


def ranges_of_other_rows(logits: Tensor, responses: Tensor) -> Tensor:
    pieces = zip(logits.split([1, 2]), responses.split([2, 1]), strict=True)
    return torch.cat([x.logsumexp(-1).sum(0, keepdim=True) * y.double().mean() for x, y in pieces]).repeat(2, 1)[:3]


def parts_of_rows(logits: Tensor, responses: Tensor) -> Tensor:
    return torch.stack(
        [x[i : i + 1].logsumexp(-1).expand(y.shape[0]) for i, (x, y) in enumerate(zip(logits, responses, strict=True))]
    )


def other_sizes(logits: Tensor, responses: Tensor) -> Tensor:
    """Constants that are as long as the row's number."""
    one = torch.ones(1, dtype=logits.dtype)
    return torch.stack([selected(x, responses[i]) * one.expand(i + 2).sum() for i, x in enumerate(logits)])


def noise(logits: Tensor, responses: Tensor) -> Tensor:
    return torch.stack([selected(x + 0 * torch.rand_like(x), y) for x, y in zip(logits, responses, strict=True)])


def means_of_pieces(logits: Tensor, responses: Tensor) -> Tensor:
    return torch.cat([x.logsumexp(-1) - x.mean((0, 2)) for x in logits.split([1, 2])])


def joined_along_another_dim(logits: Tensor, responses: Tensor) -> Tensor:
    return torch.cat([x.logsumexp(-1) for x in logits.chunk(3)], 1).view(3, -1)


ODD = [
    another_order, some_rows, a_row_twice, the_next_row, the_first_row, the_row_before, other_temperatures, another_op,
    operands_swapped, softmax_over_rows, ranges_that_overlap, ranges_of_other_rows, parts_of_rows, other_sizes, noise,
    means_of_pieces, joined_along_another_dim,
]  # fmt: skip


@pytest.mark.parametrize("logp", ODD, ids=lambda logp: logp.__name__)
def test_what_is_no_loop_over_pieces_is_refused(logp: Logp) -> None:
    torch._dynamo.reset()
    with pytest.raises((MixesRows, MixesTokens)):
        assert_same(Tiny(), *inputs(PROMPT, RESPONSE, ROWS), function=step_with(logp))


# --- ops by themselves ---

BODIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "elementwise": lambda x, y: (x * 2 + 1).exp() + torch.where(x > 0, x, -x),
    "two pieces": lambda x, y: torch.minimum(x, y * 0.5) - x.clamp(y, y + 1),
    "shared dims": lambda x, y: x * torch.arange(4.0) + torch.arange(5.0)[:, None],
    "softmax": lambda x, y: x.softmax(-1) + y.log_softmax(-2),
    "mean and norm": lambda x, y: x.mean(-1) + torch.linalg.vector_norm(y, dim=-1) + y.var(-1),
    "kept dims": lambda x, y: x - x.amax(-1, keepdim=True) + y.sum((-2, -1), keepdim=True),
    "max": lambda x, y: x.max(-2)[0] * x.max(-2)[1] + y.argmin(-2),
    "topk": lambda x, y: x.topk(2, -1)[0] + y.sort(-1)[1][..., :2],
    "gather": lambda x, y: x.gather(-1, y.argsort(-1)),
    "views": lambda x, y: x.unsqueeze(-1).transpose(-1, -2).squeeze(-2).permute(*range(x.ndim - 2), -1, -2),
    "cuts": lambda x, y: x[..., 1:3, :2] * y[..., :1, 3:] + x.select(-1, 2)[..., 1:3, None],
    "linear": lambda x, y: F.linear(x, torch.arange(12).view(3, 4) * 1.0) @ (torch.arange(6).view(3, 2) * 0.1),
    "embedding": lambda x, y: F.embedding((x > 0).long() + (y > 0).long(), torch.arange(6.0).view(3, 2)),
    "reshape": lambda x, y: x.reshape(*x.shape[:-2], 10, 2) * y.reshape(*y.shape[:-2], 1, 20)[..., :2],
    "expand": lambda x, y: x[..., None, :].expand(*x.shape[:-1], 3, 4) * y[..., :, None, :],
    "masked": lambda x, y: x.masked_fill(y > 0, 2.0) + x.masked_fill(x > 0, torch.ones(())) + torch.full_like(x, 2),
    "cumsum": lambda x, y: x.cumsum(-1) * (y > 0).any(-1, keepdim=True),
}


def joined(pieces: str, body: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Apply `body` to pieces of two values `[7, 5, 4]`, or `[2, 7, 5, 4]` and join what it returns."""
    if pieces == "rows":
        return lambda x, y: torch.stack([body(a, b) for a, b in zip(x, y, strict=True)])
    if pieces == "rows, side by side":
        return lambda x, y: torch.cat([body(a, b) for a, b in zip(x, y.unbind(), strict=True)])
    if pieces == "ranges of one":
        return lambda x, y: torch.cat([body(x[i : i + 1], y.narrow(0, i, 1)) for i in range(7)])
    if pieces == "ranges":
        return lambda x, y: torch.cat([body(a, b) for a, b in zip(x.split(3), y.tensor_split((3, 6)), strict=True)])
    raise ValueError(pieces)


def rerolled(function: Callable[..., Tensor], *args: Tensor) -> torch.fx.GraphModule:
    module = make_fx(function, tracing_mode="fake", pre_dispatch=True)(*args)
    reroll(module.graph)
    for node in reversed(list(module.graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users:
            module.graph.erase_node(node)
    module.graph.lint()
    module.recompile()
    return module


@pytest.mark.parametrize(
    "body",
    [
        lambda x, y: x > y[0, 0].double(),
        lambda x, y: torch.empty_like(x).fill_(1) * torch.rand_like(y),
        lambda x, y: F.embedding((x > 0).long(), torch.arange(6.0).view(3, 2), scale_grad_by_freq=True),
        lambda x, y: x @ y.t(),
        lambda x, y: x[:, torch.tensor([0, 2])],
    ],
    ids=["a number of another dtype", "noise", "frequencies", "pieces multiplied", "an op without a rule"],
)
def test_reroll_leaves_an_op(body: Callable[[Tensor, Tensor], Tensor]) -> None:
    x = torch.randn(3, 5, 4)
    module = rerolled(joined("rows", body), x, x + 1)
    assert module.graph.find_nodes(op="call_function", target=torch.ops.aten.stack.default)


@pytest.mark.parametrize("pieces", ["rows", "rows, side by side", "ranges of one", "ranges"])
@pytest.mark.parametrize("name", list(BODIES))
def test_reroll_of_an_op(name: str, pieces: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(7, 5, 4, generator=generator, requires_grad=True) for _ in range(2))
    function = joined(pieces, BODIES[name])
    module = rerolled(function, x, y)
    joins = [
        node for node in module.graph.nodes if node.target in (torch.ops.aten.stack.default, torch.ops.aten.cat.default)
    ]
    assert not joins, module.graph
    results = []
    for run in (function, module):
        out = run(x, y)
        grads = torch.autograd.grad(out.square().sum(), (x, y), allow_unused=True) if out.requires_grad else ()
        results.append((out, grads))
    torch.testing.assert_close(results[1], results[0])


def by_chunks_of_six(logits: Tensor, responses: Tensor) -> Tensor:
    return torch.cat([selected(x, y) for x, y in zip(logits.split(6, 1), responses.split(6, 1), strict=True)], 1)


def by_ranges_of_six(logits: Tensor, responses: Tensor) -> Tensor:
    starts = range(0, logits.shape[1], 6)
    return torch.cat([selected(logits[:, i : i + 6], responses[:, i : i + 6]) for i in starts], 1)


@pytest.mark.parametrize("logp", [by_chunks_of_six, by_ranges_of_six])
def test_chunks_of_tokens_may_divide_the_responses_or_not(logp: Logp) -> None:
    """Where they do, or leave one token over, Dynamo takes the length for a constant."""
    torch._dynamo.reset()
    for length in (14, 12, 13, 5):
        assert_same(Tiny(), *inputs(response=length), function=step_with(logp))


def by_flat_chunks_of_tokens(logits: Tensor, responses: Tensor) -> Tensor:
    pieces = zip(logits.split(4, 1), responses.split(4, 1), strict=True)
    flat = [-F.cross_entropy(x.flatten(0, 1), y.reshape(-1), reduction="none").view(y.shape) for x, y in pieces]
    return torch.cat(flat, 1)


def by_flat_writes(logits: Tensor, responses: Tensor) -> Tensor:
    flat = logits.flatten(0, 1)
    out = torch.zeros_like(flat[:, 0])
    for i in range(0, flat.shape[0], 8):
        out[i : i + 8] = flat[i : i + 8].logsumexp(-1)
    return out.view_as(responses)


@pytest.mark.parametrize("logp", [by_flat_chunks_of_tokens, by_flat_writes])
def test_a_loop_over_tokens_that_is_refused_should_be_left_out(logp: Logp) -> None:
    torch._dynamo.reset()
    with pytest.raises(LongstrawError, match=r"runs in tiles of tokens anyway.*leave it out"):
        assert_same(Tiny(), *inputs(response=10), function=step_with(logp))

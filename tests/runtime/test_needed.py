"""What adds nothing is left out: padding at the ends of rows, rows whose advantage is zero."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from longstraw.runtime import needed
from longstraw.runtime.prefix_tree import Node
from longstraw.runtime.spans import Runner
from tests.small import Tiny, assert_same, gradients, inputs, step

PROMPT, RESPONSE, PAGE = 9, 24, 4


@pytest.fixture
def tokens_run(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of every span that is run with autograd, for all its rows, from the responses' first on."""
    found: list[int] = []
    record = Runner.record

    def counted(self: Runner, where: object, leaves: object, *, appends: bool) -> object:
        if where.lo >= PROMPT - 1:
            found.append((where.hi - where.lo) * len(where.rows))
        return record(self, where, leaves, appends=appends)

    monkeypatch.setattr(Runner, "record", counted)
    return found


@pytest.fixture
def tokens_scored(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of every span whose results are written, for all its rows, from the responses' first on."""
    found: list[int] = []
    write = Runner.write_results

    def counted(self: Runner, where: object, hidden: object, results: object) -> None:
        found.append((where.hi - max(where.lo, PROMPT - 1)) * len(where.rows))
        write(self, where, hidden, results)

    monkeypatch.setattr(Runner, "write_results", counted)
    return found


def weighted(lengths: list[int]) -> tuple[Tensor, ...]:
    """Prompt, responses and weights that are zero after so many tokens of each response."""
    prompt, responses, weights = inputs(PROMPT, RESPONSE, len(lengths))
    responses[:, 0] = torch.arange(len(lengths))  # no two rows share it
    return prompt, responses, weights * (torch.arange(RESPONSE) < torch.tensor(lengths)[:, None])


@pytest.mark.parametrize("lengths", [[24, 3, 11, 0], [1, 24, 24, 2], [7, 7, 7, 7], [0, 0, 0, 0]])
@pytest.mark.parametrize("rows", [1, 2])
def test_padding_is_not_replayed(tokens_run: list[int], lengths: list[int], rows: int) -> None:
    torch._dynamo.reset()
    assert_same(Tiny(), *weighted(lengths), replay_rows=rows, page_tokens=PAGE, prompt_grad="exact")
    # The last prompt token, which predicts the first one, is run beside them where they have a node of their own.
    pages = [-(-n // PAGE) * PAGE for n in lengths]
    assert sum(lengths) <= sum(tokens_run) <= sum(pages) + len(lengths) + (not any(lengths))


@pytest.mark.parametrize("prompt_grad", ["exact", "none"])
def test_rows_with_states_of_their_own_stay_together(prompt_grad: str) -> None:
    """Prompts that differ: the nodes of their responses hang from nodes of several rows."""
    torch._dynamo.reset()
    model, (_, responses, weights) = Tiny(), weighted([24, 3, 11, 0])
    prompts = torch.randint(50, (4, PROMPT), generator=torch.Generator().manual_seed(3))

    def rows(model: nn.Module, prompts: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
        logits = model(torch.cat([prompts, responses], 1))[:, prompts.shape[1] - 1 : -1]
        return (torch.log_softmax(logits, -1).gather(-1, responses[..., None]).squeeze(-1) * weights).sum()

    if prompt_grad == "exact":
        assert_same(model, prompts, responses, weights, function=rows, replay_rows=3)
        return
    apart = torch.compile(rows, backend="longstraw", options={"prompt_grad": "none", "replay_rows": 1})
    _, expected = gradients(apart, model, prompts, responses, weights)
    expected = {name: None if grad is None else grad.clone() for name, grad in expected.items()}
    torch._dynamo.reset()
    together = torch.compile(rows, backend="longstraw", options={"prompt_grad": "none", "replay_rows": 3})
    _, found = gradients(together, model, prompts, responses, weights)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("lengths", [[24, 3, 11, 0], [1, 24, 24, 2], [7, 7, 7, 7], [0, 0, 0, 0]])
@pytest.mark.parametrize("rows", [1, 2])
def test_padding_is_not_scored(tokens_scored: list[int], lengths: list[int], rows: int) -> None:
    torch._dynamo.reset()
    assert_same(Tiny(), *weighted(lengths), replay_rows=rows, page_tokens=PAGE)
    pages = [-(-n // PAGE) * PAGE for n in lengths]
    assert sum(lengths) <= sum(tokens_scored) <= sum(pages) + (not any(lengths))


def log_probs(model: nn.Module, prompt: Tensor, responses: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of the responses' tokens, `[G, R]` each."""
    logits = model(torch.cat([prompt.expand(responses.shape[0], -1), responses], 1))[:, prompt.shape[1] - 1 : -1]
    every = torch.log_softmax(logits, -1)
    return every.gather(-1, responses[..., None]).squeeze(-1), -(every.exp() * every).sum(-1)


def clipped(model: nn.Module, prompt: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
    logp, entropy = log_probs(model, prompt, responses)
    mask, advantages = (weights != 0).double(), torch.linspace(-1, 1, len(responses)).double()[:, None]
    ratio = (logp - logp.detach() + 0.3 * weights).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    with torch.no_grad():
        mean_entropy = torch.where(mask.bool(), entropy, 0).sum() / mask.sum()
    return ((loss * mask).sum(1) / mask.sum(1).clamp(min=1)).mean() + 0 * mean_entropy


def of_sequences(model: nn.Module, prompt: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
    logp, entropy = log_probs(model, prompt, responses)
    mask = weights != 0
    ratios = (logp.masked_fill(~mask, 0).sum(-1) / mask.sum(-1).clamp(min=1)).exp()
    return ratios.mean() - 0.01 * (torch.stack([entropy, logp], -1)[..., 0].flatten() * mask.flatten()).sum()


def with_labels(model: nn.Module, prompt: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
    logits = model(torch.cat([prompt.expand(responses.shape[0], -1), responses], 1))[:, prompt.shape[1] - 1 : -1]
    labels = responses.masked_fill(weights == 0, -100)
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100)
    return (losses.view_as(weights) * weights).sum()


def of_joined_rows(model: nn.Module, prompt: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
    logp, entropy = log_probs(model, prompt, responses)
    both = torch.cat([logp, entropy], 1) * torch.cat([weights, weights], 1)
    return both.sum()


@pytest.mark.parametrize("loss", [clipped, of_sequences, with_labels, of_joined_rows])
def test_losses_read_what_their_masks_let_through(tokens_scored: list[int], loss: Callable[..., Tensor]) -> None:
    torch._dynamo.reset()
    lengths = [24, 3, 11, 7]
    assert_same(Tiny(), *weighted(lengths), function=loss, page_tokens=1)
    assert sum(tokens_scored) == sum(lengths)


def times_numbers(model: nn.Module, prompt: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
    """Sizes as factors."""
    logp, _ = log_probs(model, prompt, responses)
    return (logp * weights * responses.shape[1]).sum() * prompt.shape[1] * len(responses)


def test_factors_may_be_sizes_and_ints(tokens_scored: list[int]) -> None:
    torch._dynamo.reset()
    given, model = weighted([24, 3, 11, 7]), Tiny()
    assert_same(model, *given, function=times_numbers, page_tokens=1)
    assert sum(tokens_scored) == 45
    scaled = torch.compile(lambda n, *args: times_numbers(*args) * n, backend="longstraw")
    for n in (2, 3, 4):
        torch.testing.assert_close(scaled(n, model, *given), n * times_numbers(model, *given), rtol=1e-11, atol=1e-11)


def of_means_in_bfloat16(model: nn.Module, prompt: Tensor, responses: Tensor, rewards: Tensor) -> Tensor:
    """Advantages that are zero in float32, and not in the bfloat16 of a matrix product under autocast."""
    with torch.autocast("cpu", enabled=False):
        logp, _ = log_probs(model, prompt, responses)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mean = rewards[None] @ torch.full((len(rewards), 1), 1 / len(rewards))
    return (logp * (rewards - mean.float().squeeze())[:, None].double()).sum()


def of_means_in_float32(model: nn.Module, prompt: Tensor, responses: Tensor, rewards: Tensor) -> Tensor:
    """Factors that would be zero in the bfloat16 that is in force around the step."""
    with torch.autocast("cpu", enabled=False):
        logp, _ = log_probs(model, prompt, responses)
        mean = rewards[None] @ torch.full((len(rewards), 1), 1 / len(rewards))
    return (logp * (1 - mean.squeeze()).double()).sum()


@pytest.mark.parametrize("loss", [of_means_in_bfloat16, of_means_in_float32])
def test_factors_are_judged_in_the_dtype_in_which_the_loss_computes_them(loss: Callable[..., Tensor]) -> None:
    torch._dynamo.reset()
    prompt, responses, _ = weighted([5, 5, 5, 5])
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=loss is of_means_in_float32):
        assert_same(Tiny(), prompt, responses, torch.full((4,), 1 + 2**-10), function=loss)


def test_a_row_without_advantage_is_not_scored(tokens_scored: list[int]) -> None:
    def loss(model: nn.Module, prompt: Tensor, responses: Tensor, advantages: Tensor) -> Tensor:
        logp, _ = log_probs(model, prompt, responses)
        return -((logp - logp.detach()).exp() * advantages[:, None]).sum()

    torch._dynamo.reset()
    prompt, responses, _ = inputs(PROMPT, RESPONSE, 3)
    advantages = torch.tensor([1.0, 0.0, -1.0]).double()
    assert_same(Tiny(), prompt, responses, advantages, function=loss)
    assert sum(tokens_scored) == 2 * RESPONSE


class Weighing(Tiny):
    """A model with a factor of the loss that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones((), dtype=torch.float64))


def not_masked(model: nn.Module, prompt: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
    logp, _ = log_probs(model, prompt, responses)
    return (logp * weights).sum() + 0.1 * logp.mean()


def ordered(model: nn.Module, prompt: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
    logp, _ = log_probs(model, prompt, responses)
    return (logp.sort(-1).values * weights).sum()


def with_factor(model: Weighing, prompt: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
    """The factor's gradient is the log-probability, also where the factor is zero."""
    logp, _ = log_probs(model, prompt, responses)
    return (logp * weights).sum() + (logp * (model.factor - 1)).sum()


def compared(model: nn.Module, prompt: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
    """Whether an entry is used depends on results."""
    logp, entropy = log_probs(model, prompt, responses)
    return torch.where(entropy > entropy.mean(), logp, 0).sum() + (logp * weights).sum()


def infinite(model: nn.Module, prompt: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
    """What stands in for results that are left out would give zero times infinity."""
    logp, _ = log_probs(model, prompt, responses)
    return ((logp + 1e-9).abs().sqrt().reciprocal() * weights + (logp.abs().sqrt() * weights)).sum()


def vetoed(model: nn.Module, prompt: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
    """A factor that comes of results by an op that is not elementwise, of the other results of the row."""
    logp, entropy = log_probs(model, prompt, responses)
    likely = ~((logp.detach() < -5) & (weights != 0)).any(1, keepdim=True)
    return (logp * weights).sum() + (entropy * likely).sum() + (entropy * ~likely).sum()


def worst_rows(model: nn.Module, prompt: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
    logp, entropy = log_probs(model, prompt, responses)
    low = (logp.detach() * weights).amin(1, keepdim=True) < -0.5
    return (logp * weights).sum() + torch.where(low, entropy, 2 * entropy).sum()


def by_rank(model: nn.Module, prompt: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
    logp, _ = log_probs(model, prompt, responses)
    rank = (logp.detach() * weights).sum(1).argsort().argsort()[:, None]
    return (logp * rank).sum()


def by_deviation(model: nn.Module, prompt: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
    logp, entropy = log_probs(model, prompt, responses)
    return (entropy * (logp * weights).std()).sum() + entropy.masked_fill((logp * weights).cumsum(1) > 0, 0).sum()


def either_way(model: nn.Module, prompt: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
    logp, _ = log_probs(model, prompt, responses)
    return torch.where(weights != 0, logp, logp).sum()


READ_WHOLE = [
    not_masked,
    ordered,
    with_factor,
    compared,
    infinite,
    vetoed,
    worst_rows,
    by_rank,
    by_deviation,
    either_way,
]


@pytest.mark.parametrize("loss", READ_WHOLE)
def test_all_is_scored_where_all_is_read(tokens_scored: list[int], loss: Callable[..., Tensor]) -> None:
    torch._dynamo.reset()
    assert_same(Weighing(), *weighted([24, 3, 11, 0]), function=loss, replay_rows=1)
    assert sum(tokens_scored) == 4 * RESPONSE


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_is_read_is_scored_without_gradients_too(mode: Callable[[], AbstractContextManager[None]]) -> None:
    torch._dynamo.reset()
    model, lengths = Tiny(), [24, 3, 0, 11]
    compiled = torch.compile(clipped, backend="longstraw", options={"page_tokens": PAGE})
    with mode():
        given = weighted(lengths)
        torch.testing.assert_close(compiled(model, *given), clipped(model, *given), rtol=1e-11, atol=1e-12)


def test_noise_in_the_loss_is_drawn_once() -> None:
    def noisy(model: nn.Module, prompt: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
        logp, _ = log_probs(model, prompt, responses)
        return (logp * weights).sum() + (logp * torch.rand_like(logp) * weights).sum()

    torch._dynamo.reset()
    model, given, found = Tiny(), weighted([24, 3, 0, 11]), []
    for function in (noisy, torch.compile(noisy, backend="longstraw")):
        torch.manual_seed(0)
        found.append((function(model, *given), torch.rand(())))
    torch.testing.assert_close(found[1], found[0], rtol=1e-11, atol=1e-12)


def test_results_that_are_returned_are_scored() -> None:
    def both(model: nn.Module, prompt: Tensor, responses: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        logp, _ = log_probs(model, prompt, responses)
        return (logp * weights).sum(), logp

    torch._dynamo.reset()
    model, given = Tiny(), weighted([24, 3, 0, 11])
    found = torch.compile(both, backend="longstraw", options={"page_tokens": PAGE})(model, *given)
    torch.testing.assert_close(found, both(model, *given), rtol=1e-11, atol=1e-12)


def test_masked_entries_that_are_returned_are_zeros() -> None:
    def masked(model: nn.Module, prompt: Tensor, responses: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        logp, _ = log_probs(model, prompt, responses)
        return (logp * weights).sum(), logp * weights

    torch._dynamo.reset()
    model, given = Tiny(), weighted([24, 3, 0, 11])
    found = torch.compile(masked, backend="longstraw", options={"page_tokens": PAGE})(model, *given)
    torch.testing.assert_close(found, masked(model, *given), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("at", [10, 20])
def test_a_result_that_is_not_finite_is_replayed(at: int) -> None:
    """Zero times infinity is no number, in eager and here; what is left out altogether is not multiplied."""

    def masked(model: nn.Module, prompt: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
        logp, _ = log_probs(model, prompt, responses)
        return torch.where(weights != 0, logp * weights, 0).sum()

    class Infinite(Tiny):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) / (ids != 7)[..., None]

    model, (prompt, responses, weights) = Infinite(), weighted([24, 15, 11, 5])
    prompt[prompt == 7] = 8
    responses[responses == 7] = 8
    responses[1, at] = 7
    weights[1, at + 1] = 0
    torch._dynamo.reset()
    _, expected = gradients(masked, model, prompt, responses, weights)
    assert any(grad is not None and grad.isnan().any() for grad in expected.values())
    expected = {name: None if grad is None else grad.isnan() for name, grad in expected.items()}
    run = torch.compile(masked, backend="longstraw", options={"replay_rows": 1, "span_tokens": 4, "page_tokens": 1})
    _, found = gradients(run, model, prompt, responses, weights)
    del expected["table.weight"]  # eager's also has one for the last token, which nothing is computed from
    if at < 15:
        assert all(grad is None or torch.equal(found[name].isnan(), grad) for name, grad in expected.items())
    else:
        assert not any(grad is not None and grad.isnan().any() for grad in found.values())


def test_gradients_that_are_zero_are_there() -> None:
    torch._dynamo.reset()
    run = torch.compile(step, backend="longstraw", options={"replay_rows": 1, "span_tokens": 4})
    _, found = gradients(run, Tiny(), *weighted([0, 0]))
    assert all(grad is not None and not grad.any() for grad in found.values())


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=12), st.integers(1, 8), st.integers(1, 5))
def test_rows_are_run_to_their_ends_and_less_than_a_page_further(lengths: list[int], page: int, size: int) -> None:
    start = 5
    leaves = [
        Node(list(range(i, min(i + size, len(lengths)))), start, start + 30, False)
        for i in range(0, len(lengths), size)
    ]
    found = needed.shortened(leaves, [start + n if n else 0 for n in lengths], page=page, batch=lambda tokens: size)
    run = {row: node.stop - start for node in found for row in node.rows}
    assert run.keys() == {row for row, n in enumerate(lengths) if n}
    assert all(lengths[row] <= n < lengths[row] + page for row, n in run.items())
    assert all(len(node.rows) <= size for node in found)

import dataclasses
import math
from dataclasses import dataclass

import pytest
import torch

from longstraw.runtime import attention, key_parts
from longstraw.runtime.attention import attend
from longstraw.runtime.kernels import attention_parts
from longstraw.runtime.key_parts import KeyRange, cut


@dataclass
class DenseBlocks:
    """Blocks read from the whole matrix [rows|1, heads|1, S, S]; verdicts on more than `sure` keys are "mixed"."""

    matrix: torch.Tensor
    sure: int = 10**9

    def verdict(self, q0, q1, k0, k1):
        block = self.tensor(q0, q1, k0, k1)
        if k1 - k0 > self.sure:
            return "mixed"
        if block.dtype == torch.bool:
            return "all" if block.all() else "mixed" if block.any() else "none"
        return "all" if (block == 0).all() else "none" if (block == -torch.inf).all() else "mixed"

    def tensor(self, q0, q1, k0, k1):
        return self.matrix[:, :, q0:q1, k0:k1]


def causal(size, rows=2, heads=4):
    return torch.ones(size, size, dtype=torch.bool).tril()[None, None]


def window(size, rows=2, heads=4):
    return causal(size) & ~causal(size).tril(-9)


def padded(size, rows=2, heads=4):
    """Row r starts with 5 r pads, which nobody sees and which see nobody."""
    valid = torch.arange(size) >= 5 * torch.arange(rows)[:, None]
    return causal(size) & valid[:, None, None, :] & valid[:, None, :, None]


def packed(size, rows=2, heads=4):
    document = torch.stack([torch.arange(size) // (11 + 6 * r) for r in range(rows)])
    return causal(size) & (document[:, None, :, None] == document[:, None, None, :])


def alibi(size, rows=2, heads=4):
    distance = torch.arange(size)[None, :] - torch.arange(size)[:, None]
    bias = distance * 0.5 ** torch.arange(1, heads + 1, dtype=torch.float64)[:, None, None]
    return bias.masked_fill(distance > 0, -torch.inf)[None]


def holed(size, rows=2, heads=4):
    """Causal, but some queries see nothing, and some nothing earlier than the last tokens."""
    seen = causal(size).clone()
    seen[..., max(size - 3, 0), :] = False
    seen[..., size // 2, :] = False
    seen[..., size - 1, : size - 1] = False
    return seen


def nothing(size, rows=2, heads=4):
    return torch.zeros(1, 1, size, size, dtype=torch.bool)


def everything(size, rows=2, heads=4):
    return torch.ones(1, 1, size, size, dtype=torch.bool)


PATTERNS = [causal, window, padded, packed, alibi, holed, nothing, everything]


def softcap(raw, q0, q1, k0, k1, cap, slope):
    """Coordinates and per-head inputs both matter."""
    distance = torch.arange(q0, q1)[:, None] - torch.arange(k0, k1)[None, :]
    return cap * torch.tanh(raw / cap) + slope[:, None, None] * distance.to(raw.dtype).cos()


@dataclass
class Problem:
    """Inputs of one call, in float64 and in the dtype of the call."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    earlier: list  # (key, value) of consecutive ranges
    matrix: torch.Tensor
    scale: float
    score: object = None
    score_inputs: tuple = ()
    sink: torch.Tensor | None = None

    @property
    def leaves(self):
        pairs = [x for pair in self.earlier for x in pair]
        sinks = [] if self.sink is None else [self.sink]
        return [self.query, self.key, self.value, *sinks, *self.score_inputs, *pairs]

    def to(self, dtype):
        def convert(x):
            return None if x is None else x.detach().to(dtype)

        return Problem(
            convert(self.query),
            convert(self.key),
            convert(self.value),
            [(convert(k), convert(v)) for k, v in self.earlier],
            self.matrix,
            self.scale,
            self.score,
            tuple(convert(x) for x in self.score_inputs),
            convert(self.sink),
        )


def problem(
    *, tokens=7, ranges=((13, 1), (6, 2)), rows=2, heads=4, key_heads=2, value_heads=None, width=8, value_width=None,
    pattern=causal, score=False, sink=False, seed=0,
):  # fmt: skip
    """`ranges` holds the length and the number of rows of each earlier range."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    value_heads, value_width = value_heads or key_heads, value_width or width
    size = tokens + sum(n for n, _ in ranges)
    return Problem(
        query=randn(rows, heads, tokens, width),
        key=randn(rows, key_heads, tokens, width),
        value=randn(rows, value_heads, tokens, value_width),
        earlier=[(randn(r, key_heads, n, width), randn(r, value_heads, n, value_width)) for n, r in ranges],
        matrix=pattern(size, rows, heads),
        scale=0.4,
        score=softcap if score else None,
        score_inputs=(torch.tensor(1.5, dtype=torch.float64), randn(heads)) if score else (),
        sink=randn(heads) if sink else None,
    )


def dense(p):
    """Output and gradients (of `leaves`, for the output's gradient `cos(arange)`) by one softmax over all keys."""
    leaves = [x.detach().requires_grad_() for x in p.leaves]
    rest = iter(leaves)
    query, key, value = next(rest), next(rest), next(rest)
    sink = None if p.sink is None else next(rest)
    score_inputs = [next(rest) for _ in p.score_inputs]
    rows, heads, tokens, _ = query.shape
    pairs = [(next(rest), next(rest)) for _ in p.earlier] + [(key, value)]
    keys, values = (
        torch.cat([x.expand(rows, -1, -1, -1) for x in xs], 2).repeat_interleave(heads // xs[0].shape[1], 1)
        for xs in zip(*pairs, strict=True)
    )
    size = keys.shape[2]
    start = size - tokens
    scores = query @ keys.mT * p.scale
    if p.score is not None:
        scores = p.score(scores, start, size, 0, size, *score_inputs)
    block = p.matrix[:, :, start:]
    bias = torch.zeros(block.shape, dtype=scores.dtype)
    bias = bias.masked_fill(~block, -torch.inf) if block.dtype == torch.bool else block.to(scores.dtype)
    scores = scores + bias
    if sink is not None:
        scores = torch.cat([scores, sink[:, None, None].expand(rows, heads, tokens, 1)], -1)
        values = torch.cat([values, values.new_zeros(rows, heads, 1, values.shape[-1])], 2)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(empty, 0), -1).masked_fill(empty, 0)
    out = weights @ values
    return out.detach(), torch.autograd.grad(out, leaves, upstream(out), allow_unused=True)


def upstream(out):
    return torch.arange(out.numel(), dtype=torch.float64).cos().view(out.shape).to(out.dtype)


def longstraw(p, *, grad_dtype=None, accumulated=0.0, sure=10**9, key_tile=4096):
    """As `dense`, by `attend`; accumulators start at `accumulated`."""
    earlier, start = [], 0
    for key, value in p.earlier:
        grads = [torch.full_like(x, accumulated, dtype=grad_dtype or x.dtype) for x in (key, value)]
        earlier.append(KeyRange(start, key, value, *grads))
        start += key.shape[2]
    own = [x.detach().requires_grad_() for x in (p.query, p.key, p.value)]
    sink = None if p.sink is None else p.sink.detach().requires_grad_()
    score_inputs = tuple(x.detach().requires_grad_() for x in p.score_inputs)
    out = attend(
        *own, start=start, earlier=earlier, blocks=DenseBlocks(p.matrix, sure), scale=p.scale, score=p.score,
        score_inputs=score_inputs, sink=sink, key_tile=key_tile,
    )  # fmt: skip
    wanted = [*own, *([] if sink is None else [sink]), *score_inputs]
    grads = torch.autograd.grad(out, wanted, upstream(out))
    return out.detach(), (*grads, *(g for r in earlier for g in (r.key_grad, r.value_grad)))


def assert_equal_to_dense(p, **options):
    out, grads = longstraw(p, **options)
    expected_out, expected = dense(p)
    assert out.dtype == p.query.dtype
    torch.testing.assert_close(out, expected_out, rtol=1e-12, atol=1e-12)
    assert len(grads) == len(expected)
    for got, want in zip(grads, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


@pytest.fixture
def small_tiles(monkeypatch):
    for module in (attention, key_parts):
        monkeypatch.setattr(module, "CUT", 4)
    monkeypatch.setattr(key_parts, "MASK_TILE", 16)
    monkeypatch.setattr(key_parts, "QUERY_TILE", 24)


@pytest.fixture
def reference_kernel(monkeypatch):
    monkeypatch.setattr(attention_parts, "_TABLE", ())


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("ranges", [(), ((13, 1),), ((13, 2),), ((13, 1), (1, 2), (6, 2))])
@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_attend_equals_dense_softmax(pattern, ranges, tokens):
    assert_equal_to_dense(problem(pattern=pattern, ranges=ranges, tokens=tokens))


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("score", [False, True])
@pytest.mark.parametrize("sink", [False, True])
def test_attend_in_many_tiles_equals_dense_softmax(pattern, score, sink, small_tiles):
    p = problem(pattern=pattern, ranges=((40, 1), (21, 2)), tokens=40, score=score, sink=sink)
    assert_equal_to_dense(p, key_tile=32)


@pytest.mark.parametrize("pattern", [causal, window])
def test_attend_in_tiles_of_the_real_size_equals_dense_softmax(pattern):
    p = problem(pattern=pattern, ranges=((700, 1),), tokens=2300, rows=1, heads=1, key_heads=1, width=4)
    assert_equal_to_dense(p, key_tile=512)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_reference_kernel_equals_dense_softmax(pattern, small_tiles, reference_kernel):
    assert_equal_to_dense(problem(pattern=pattern, ranges=((50, 1), (21, 2)), tokens=37, value_width=3))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "heads, key_heads, value_heads, value_width",
    [(4, 4, 4, 8), (6, 2, 2, 8), (4, 1, 1, 8), (4, 2, 2, 5), (4, 2, 2, 12), (4, 1, 4, 8), (12, 2, 3, 4)],
)
@pytest.mark.parametrize("pattern", [causal, padded, alibi])
def test_attend_with_grouped_heads_and_widths(pattern, rows, heads, key_heads, value_heads, value_width):
    shape = {"heads": heads, "key_heads": key_heads, "value_heads": value_heads, "value_width": value_width}
    assert_equal_to_dense(problem(rows=rows, ranges=((13, 1), (6, rows)), pattern=pattern, **shape))


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("which", ["query", "key", "value"])
def test_attend_to_numbers_that_lie_apart(pattern, which):
    """As after a convolution over tokens: library kernels read the last dim as if its numbers lay side by side."""
    p = problem(pattern=pattern)
    transposed = getattr(p, which).mT.contiguous().mT
    assert transposed.stride(-1) != 1
    assert_equal_to_dense(dataclasses.replace(p, **{which: transposed}))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_attend_with_score_and_sink(pattern):
    assert_equal_to_dense(problem(pattern=pattern, score=True))
    assert_equal_to_dense(problem(pattern=pattern, sink=True))


@pytest.mark.parametrize("sure", [1, 6])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_attend_with_blocks_that_say_mixed_when_unsure(pattern, sure, small_tiles):
    assert_equal_to_dense(problem(pattern=pattern, tokens=20, ranges=((30, 1),)), sure=sure)


def test_attend_adds_to_what_the_accumulators_hold():
    p = problem()
    _, zeroed = longstraw(p)
    _, started = longstraw(p, accumulated=3.0)
    for was, now in zip(zeroed[3:], started[3:], strict=True):
        torch.testing.assert_close(now, was + 3, rtol=1e-12, atol=1e-12)


def test_attend_without_accumulators_and_without_grad():
    p = problem(ranges=((13, 1),))
    held = KeyRange(0, *p.earlier[0], None, None)
    arguments = {"start": 13, "earlier": [held], "blocks": DenseBlocks(p.matrix), "scale": p.scale}
    leaves = [x.clone().requires_grad_() for x in (p.query, p.key, p.value)]
    out = attend(*leaves, **arguments)
    _, expected = dense(p)
    for got, want in zip(torch.autograd.grad(out, leaves, upstream(out)), expected[:3], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)
    with torch.no_grad():
        silent = attend(*leaves, **arguments)
    assert not silent.requires_grad and torch.equal(silent, out)


def test_attend_takes_views_of_transposed_projections_and_expanded_gradients():
    p = problem(pattern=padded)
    straight = longstraw(p)
    p.query, p.key, p.value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (p.query, p.key, p.value))
    assert torch.equal(longstraw(p)[0], straight[0])
    leaf = p.query.requires_grad_()
    out = attend(leaf, p.key, p.value, start=0, earlier=(), blocks=DenseBlocks(causal(7)), scale=1.0)
    (by_sum,) = torch.autograd.grad(out.sum(), leaf, retain_graph=True)
    (by_ones,) = torch.autograd.grad(out, leaf, torch.ones_like(out))
    assert torch.equal(by_sum, by_ones)


def test_attend_reads_nothing_outside_a_range():
    p = problem(ranges=((13, 1), (6, 2)))
    expected = longstraw(p)

    def inside_nan(x):
        store = torch.full((x.shape[0], x.shape[1], 40, x.shape[3]), torch.nan, dtype=x.dtype)
        view = store[:, :, 9 : 9 + x.shape[2]]
        view.copy_(x)
        return view

    p.earlier = [(inside_nan(k), inside_nan(v)) for k, v in p.earlier]
    for got, want in zip([*longstraw(p)[1]], expected[1], strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("score", [False, True])
def test_attend_is_deterministic(score, small_tiles):
    p = problem(ranges=((50, 1), (21, 2)), tokens=33, score=score).to(torch.float32)
    (first, first_grads), (second, second_grads) = longstraw(p), longstraw(p)
    assert torch.equal(first, second)
    assert all(torch.equal(a, b) for a, b in zip(first_grads, second_grads, strict=True))


@pytest.mark.parametrize("score", [False, True])
def test_attend_saves_nothing_that_grows_with_the_keys(score):
    def saved_elements(prefix):
        sizes = []
        p = problem(ranges=((prefix, 1),), tokens=16, score=score)
        leaves = [x.requires_grad_() for x in (p.query, p.key, p.value)]
        held = KeyRange(0, *p.earlier[0], *map(torch.zeros_like, p.earlier[0]))

        def pack(x):
            sizes.append(x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            blocks = DenseBlocks(p.matrix)
            attend(
                *leaves, start=prefix, earlier=[held], blocks=blocks, scale=1.0, score=p.score,
                score_inputs=p.score_inputs,
            )  # fmt: skip
        return sizes

    assert saved_elements(700) == saved_elements(20)
    assert max(saved_elements(700)) <= 2 * 4 * 16 * 8


@pytest.mark.parametrize("pattern", [causal, alibi])
def test_attend_builds_no_tensor_of_queries_by_keys(pattern, small_tiles):
    """Temporaries of more than a few tiles never appear, with keys ten times as many as a tile holds."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for x in result if isinstance(result, tuple | list) else [result]:
                if isinstance(x, torch.Tensor) and not func.is_view:
                    self.elements = max(self.elements, x.numel())
            return result

    class Blocks(DenseBlocks):
        def verdict(self, q0, q1, k0, k1):
            return "mixed" if pattern is alibi else "all" if k1 <= q0 + 1 else "none" if k0 >= q1 else "mixed"

    tokens, prefix = 24, 480
    p = problem(tokens=tokens, ranges=((prefix, 1),), rows=1, width=4, pattern=pattern)
    leaves = [x.requires_grad_() for x in (p.query, p.key, p.value)]
    held = KeyRange(0, *p.earlier[0], *map(torch.zeros_like, p.earlier[0]))
    with Largest() as largest:
        out = attend(*leaves, start=prefix, earlier=[held], blocks=Blocks(p.matrix), scale=1.0, key_tile=48)
        out.backward(upstream(out))
    assert largest.elements <= 4 * 24 * 16  # heads x QUERY_TILE x MASK_TILE


@pytest.mark.parametrize("prefix, expected", [(100, ["all"] * 3), (20, ["all"])])
def test_cut_merges_seen_runs_and_drops_unseen_ones(prefix, expected, small_tiles):
    p = problem(tokens=8, ranges=((prefix, 1), (30, 1)))
    p.matrix[..., prefix : prefix + 30] = False
    blocks, earlier = DenseBlocks(p.matrix, sure=24), [(0, prefix), (prefix, prefix + 30)]
    ((_, _, parts),) = cut(blocks, prefix + 30, 8, earlier, key_tile=40, builds_scores=False)
    assert [x.kind for x in parts] == [*expected, "causal"]
    assert {x.source for x in parts} == {0, -1}


def test_cut_of_a_sliding_window_looks_at_the_window_only():
    size = 4096
    seen = causal(size) & ~causal(size).tril(-128)
    plan = cut(DenseBlocks(seen), size - 512, 512, [(0, size - 512)], key_tile=4096, builds_scores=False)
    earlier = [x for _, _, parts in plan for x in parts if x.source == 0]
    assert [(x.k0, x.k1) for x in earlier] == [(size - 512 - 128, size - 512)]


def error(got, exact):
    return max(((g.double() - e).norm() / (e.norm() + 1e-30)).item() for g, e in zip(got, exact, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pattern", [causal, padded])
@pytest.mark.parametrize("score", [False, True])
def test_attend_errs_no_more_than_eager_in_the_same_precision(dtype, pattern, score, small_tiles):
    """Over six problems together: a single number, such as a cap's gradient, may come out exact by luck."""
    ours, eagers, exacts = [], [], []
    for seed in range(6):
        p = problem(pattern=pattern, ranges=((40, 1), (24, 2)), tokens=32, width=16, score=score, seed=seed).to(dtype)
        for found, (out, grads) in (
            (exacts, dense(p.to(torch.float64))),
            (eagers, dense(p)),
            (ours, longstraw(p, grad_dtype=torch.float32)),
        ):
            found.append([out, *grads])
    rounding = 4 * torch.finfo(torch.float32).eps + (0 if dtype is torch.float32 else torch.finfo(dtype).eps / 4)
    for mine, theirs, want in zip(
        *(map(torch.stack, zip(*x, strict=True)) for x in (ours, eagers, exacts)), strict=True
    ):
        assert error([mine], [want]) <= error([theirs], [want]) + rounding


def test_bfloat16_error_does_not_grow_with_the_number_of_parts():
    def worst(parts):
        p = problem(ranges=((128 // parts, 1),) * parts, tokens=64, width=16).to(torch.bfloat16)
        out, grads = longstraw(p, grad_dtype=torch.float32)
        exact_out, exact = dense(p.to(torch.float64))
        return error([out], [exact_out]), *(error([g], [e]) for g, e in zip(grads[:3], exact[:3], strict=True))

    for one, eight in zip(worst(1), worst(8), strict=True):
        assert eight <= 1.2 * one + 1e-4


def test_key_lengths_zero_and_three_give_zeros_for_the_empty_row():
    p = problem(tokens=3, ranges=(), pattern=everything)
    p.matrix = torch.zeros(2, 1, 3, 3, dtype=torch.bool)
    p.matrix[1] = True
    out, grads = longstraw(p)
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    assert all(torch.equal(g[0], torch.zeros_like(g[0])) for g in grads)
    assert_equal_to_dense(p)


@pytest.mark.parametrize("bias", ["none", "some", "causal"])
def test_kernels_return_natural_lse_and_minus_infinity_where_nothing_is_seen(bias):
    torch.manual_seed(0)
    query, key, value = (torch.randn(*s, dtype=torch.float64) for s in ((2, 3, 5, 4), (2, 5, 4), (2, 5, 4)))
    mask = torch.zeros(1, 1, 5, 5, dtype=torch.float64)
    if bias == "causal":
        mask.masked_fill_(~causal(5), -torch.inf)
    if bias == "some":
        mask[..., 2, :] = -torch.inf
    scores = query @ key[:, None].mT * 0.3 + mask
    tile = attention_parts.Tile(query, key, value, 0.3, bias == "causal", mask if bias == "some" else None)
    for kernel in (attention_parts.FlashCPU(), attention_parts.Reference()):
        out, lse = kernel.forward(tile)
        torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-13, atol=1e-13)
        if bias == "some":
            assert torch.equal(out[:, :, 2], torch.zeros(2, 3, 4, dtype=torch.float64))
            assert (lse[:, :, 2] == -math.inf).all()


@pytest.mark.parametrize("causal", [False, True])
def test_cuda_kernel_takes_these_arguments(causal):
    """On the meta device: the schema and the shapes, not the numbers."""
    query, key, value = (
        torch.empty(*s, dtype=torch.bfloat16, device="meta") for s in ((2, 3, 8, 24), (2, 8, 24), (2, 8, 16))
    )
    tile = attention_parts.Tile(query, key, value, 0.3, causal)
    kernel = attention_parts.FlashCUDA()
    out, lse = kernel.forward(tile)
    assert out.shape == (2, 3, 8, 16) and lse.shape == (2, 3, 8) and lse.dtype == torch.float32
    grads = kernel.backward(tile, out, out, lse)
    assert (grads.query.shape, grads.key.shape, grads.value.shape) == (query.shape, key.shape, value.shape)


@pytest.mark.parametrize(
    "device, dtype, width, biased, rescored, expected",
    [
        ("cpu", torch.bfloat16, 7, True, False, attention_parts.FlashCPU),
        ("cpu", torch.float64, 8, False, True, attention_parts.Reference),
        ("cuda", torch.bfloat16, 128, False, False, attention_parts.FlashCUDA),
        ("cuda", torch.bfloat16, 128, True, False, attention_parts.Reference),
        ("cuda", torch.float32, 128, False, False, attention_parts.Reference),
        ("cuda", torch.float16, 12, False, False, attention_parts.Reference),
        ("meta", torch.float32, 8, False, False, attention_parts.FlashCPU),  # sizes as on the CPU
        ("mps", torch.float32, 8, False, False, attention_parts.Reference),
    ],
)
def test_pick_kernel(device, dtype, width, biased, rescored, expected):
    kernel = attention_parts.pick_kernel(torch.device(device), dtype, width, biased=biased, rescored=rescored)
    assert type(kernel) is expected


def test_scores_far_apart_do_not_overflow():
    p = problem(tokens=4, ranges=((5, 1),)).to(torch.float32)
    p.query, p.scale = p.query * 100, 1.0
    exact_out, exact = dense(p.to(torch.float64))
    out, grads = longstraw(p)
    assert error([out], [exact_out]) < 1e-4 and error(grads[2:3], exact[2:3]) < 1e-4
    assert all(g.isfinite().all() for g in grads)

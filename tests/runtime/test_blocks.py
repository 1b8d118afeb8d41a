"""Blocks of masks: equal to the slice of the whole mask, and verdicts that agree with it."""

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx
from transformers import PreTrainedConfig, masking_utils

from longstraw import compat
from longstraw.arch.masks import block_program
from longstraw.blocks import HIDING, UNSEEN
from longstraw.runtime.blocks import CausalBlocks, EverySeen, bind, both

G, S, H = 3, 23, 2
LOWEST = torch.finfo(torch.float32).min


def trace(function, *args):
    """The ATen graph of a function and the values of its placeholders."""
    found = []

    def backend(gm, _):
        graph = compat.to_aten(lambda *a: fx.Interpreter(gm).run(*a), compat.fake_inputs(gm))

        def run(*values):
            found.append((graph, values))
            return gm(*values)

        return run

    torch._dynamo.reset()
    with torch._dynamo.config.patch(specialize_float=True):
        whole = torch.compile(function, backend=backend, fullgraph=True, dynamic=True)(*args)
    return *found[0], whole


def everything_small(node):
    """All that has fewer than two dims of tokens: what a step computes once."""
    output = next(item for item in node.graph.nodes if item.op == "output").args[0]
    output = output[0] if isinstance(output, (tuple, list)) else output
    tokens = compat.expression(output.meta["val"].shape[-1])
    return sum(compat.expression(size) == tokens for size in node.meta["val"].shape) < 2 or node.op == "placeholder"


def leaves(node):
    """Only placeholders, counts and what reduces or looks up."""
    if node.op in ("placeholder", "get_attr") or any(part in str(node.target) for part in ("cumsum", "sum", "diff")):
        return True
    looked_up = torch.ops.aten.index.Tensor
    return any(user.target is looked_up and user.args[0] is node for user in node.users)


class Traced:
    """A traced mask with the value of every node and the whole mask."""

    def __init__(self, function, *args):
        self.graph, examples, self.whole = trace(function, *args)
        (output,) = (node for node in self.graph.graph.nodes if node.op == "output")
        self.output = output.args[0][0]
        self.values = values = {}

        class Keep(fx.Interpreter):
            def run_node(self, n):
                values[n] = super().run_node(n)
                return values[n]

        Keep(self.graph).run(*examples)

    def blocks(self, light, rows=None, **options):
        program = block_program(self.output, is_light=light)
        return bind(program, [self.values[node] for node in program.inputs], rows, **options)


def whole_block(whole, rows, q0, q1, k0, k1):
    if whole.ndim == 3 and whole.shape[0] % G == 0:
        whole = whole.unflatten(0, (G, -1))
    while whole.ndim < 4:
        whole = whole[None]
    if rows is not None and whole.shape[0] == G:
        whole = whole[list(rows)]
    whole = whole.expand(-1, -1, S if whole.shape[2] == 1 else -1, -1)
    return whole[:, :, q0:q1, k0:k1]


def check(blocks, whole, rows, ranges, single=True):
    """Each block is right, and so is its verdict. Returns the verdicts."""
    verdicts = set()
    for q0, q1, k0, k1 in ranges:
        expected = whole_block(whole, rows, q0, q1, k0, k1)
        got = blocks.tensor(q0, q1, k0, k1)
        assert got.dtype == expected.dtype and got.ndim == 4 and got.shape[2:] == expected.shape[2:]
        torch.testing.assert_close(got.broadcast_to(expected.shape), expected, rtol=0, atol=0, equal_nan=True)
        verdict = blocks.verdict(q0, q1, k0, k1)
        verdicts.add(verdict)
        if verdict != "mixed" and expected.numel():
            is_bool = expected.dtype == torch.bool
            wanted = (verdict == "all") if is_bool else (0.0 if verdict == "all" else None)
            if wanted is not None:
                assert bool((expected == wanted).all()), verdict
            else:
                assert float(expected.max()) <= getattr(blocks, "unseen", float("-inf"))
        elif single and expected.numel() == 1 and expected.dtype == torch.bool:
            raise AssertionError("a single element is never mixed")
    return verdicts


ALL_RANGES = [(q, min(q + 6, S), k, min(k + 4, S)) for q in (0, 7, 12, 18) for k in (0, 5, 9, 13, 20)]


def masks_of_transformers():
    """(name, function, args): each way in which the library builds a mask."""
    kinds = {
        "causal": masking_utils.create_causal_mask,
        "window": masking_utils.create_sliding_window_causal_mask,
        "chunked": masking_utils.create_chunked_causal_mask,
    }
    padding = torch.ones(G, S, dtype=torch.long)
    padding[0, :4] = 0
    padding[2, :9] = 0
    right = torch.ones(G, S, dtype=torch.bool)
    right[1, 17:] = False
    plain = torch.arange(S)[None].clone()
    packed = torch.cat([torch.arange(9), torch.arange(6), torch.arange(S - 15)])[None].expand(G, -1).contiguous()
    cases = {
        "no mask": (None, None),
        "left padding": (padding, None),
        "right padding": (right, None),
        "positions": (None, plain),
        "packed": (None, packed),
        "padding and positions": (padding, packed),
    }
    for attention in ("sdpa", "eager"):
        for kind, create in kinds.items():
            for name, (mask, positions) in cases.items():
                config = PreTrainedConfig(attn_implementation=attention)
                config.sliding_window, config.attention_chunk_size = 6, 7

                def build(embeds, mask, positions, create=create, config=config):
                    return create(
                        config=config,
                        inputs_embeds=embeds,
                        attention_mask=mask,
                        past_key_values=None,
                        position_ids=positions,
                    )

                if (attention, kind, name) == ("sdpa", "causal", "no mask"):
                    continue  # left to is_causal
                yield pytest.param(build, mask, positions, id=f"{attention}-{kind}-{name}".replace(" ", "_"))


ROWS = [None, [2, 0], slice(1, 2)]


def check_all(traced, **options):
    """Every choice of light nodes and rows. Returns the verdicts on all rows."""
    found = {True: set(), False: set()}
    for light in (everything_small, leaves):
        for rows in ROWS:
            numbers = list(range(G))[rows] if isinstance(rows, slice) else rows
            verdicts = check(traced.blocks(light, rows, **options), traced.whole, numbers, ALL_RANGES)
            found[rows is None] |= verdicts
    return found[True]


@pytest.mark.parametrize(("build", "mask", "positions"), list(masks_of_transformers()))
def test_blocks_of_the_librarys_masks_equal_the_whole(build, mask, positions):
    traced = Traced(lambda *args: build(*args), torch.zeros(G, S, 8), mask, positions)
    verdicts = check_all(traced, unseen=UNSEEN)
    assert {"none", "mixed"} <= verdicts


def index_mask(ids):
    index = torch.arange(ids.shape[1])
    return index[None, :] <= index[:, None]


class Buffer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.tril(torch.ones(64, 64, dtype=torch.bool)).view(1, 1, 64, 64).clone())

    def forward(self, ids):
        return self.seen[:, :, : ids.shape[1], : ids.shape[1]]


def buffer_mask(ids, module=Buffer()):  # noqa: B008
    return module(ids)


def triangle_of_lowest(ids):
    size = ids.shape[1]
    return torch.full((size, size), LOWEST).triu(1)[None, None].expand(ids.shape[0], 1, size, size)


def triangle_of_ones(ids):
    size = ids.shape[1]
    return torch.tril(torch.ones(size, size, dtype=torch.bool)).view(1, 1, size, size)


def minus_infinity(ids):
    size = ids.shape[1]
    return torch.triu(torch.full((size, size), float("-inf")), diagonal=1)


def inverted(ids, padding):
    size = ids.shape[1]
    seen = torch.tril(torch.ones(size, size))[None, None] * padding[:, None, None, :].to(torch.float32)
    return (1.0 - seen) * LOWEST


def filled(ids, padding):
    size = ids.shape[1]
    expanded = padding[:, None, None, :].expand(ids.shape[0], 1, size, size).to(torch.float32)
    opposite = 1.0 - expanded
    opposite = opposite.masked_fill(opposite.to(torch.bool), LOWEST)
    index = torch.arange(size)
    ahead = torch.full((size, size), LOWEST).masked_fill(index < (index + 1).view(size, 1), 0)
    return ahead[None, None] + opposite.clamp(min=LOWEST / 4)


def distance_window(ids):
    index = torch.arange(ids.shape[1])
    distance = index[:, None] - index[None, :]
    return (distance.abs() < 5) & (distance >= 0)


def same_chunk(ids):
    index = torch.arange(ids.shape[1])
    return torch.logical_and((index // 6)[:, None] == (index // 6)[None, :], index[:, None] >= index[None, :])


def sinks_and_window(ids):
    index = torch.arange(ids.shape[1])
    query, key = index[:, None], index[None, :]
    return ((key <= 2) | (query - key < 6)) & ~(key > query)


def remainder_mask(ids):
    index = torch.arange(ids.shape[1])
    return (index[:, None] % 8 >= 4) & (index[None, :] <= index[:, None])


def linear_bias(ids):
    slopes = torch.tensor([0.5, 0.25])
    index = torch.arange(ids.shape[1])
    bias = slopes[:, None, None] * index[None, None, :]
    return torch.where((index[None, :] <= index[:, None])[None], bias, LOWEST)


def linear_bias_of_rows(ids, padding):
    slopes = torch.tensor([0.5, 0.25])
    count = (padding.cumsum(-1) - 1) * padding
    bias = (slopes[None, :, None, None] * count[:, None, None, :]).reshape(-1, 1, ids.shape[1])
    index = torch.arange(ids.shape[1])
    return bias.masked_fill(index[None, :] > index[:, None], float("-inf"))


def merged_heads(ids, padding):
    rows, size = ids.shape
    seen = (padding[:, None, :] * padding[:, :, None]).to(torch.bool)[:, None].expand(rows, 4, size, size)
    return seen.reshape(rows * 4, size, size)


def key_padding(ids, padding):
    return padding[:, None, None, :].to(torch.bool)


def shifted(ids):
    index = torch.arange(ids.shape[1] + 1)
    return (index[None, :] < index[:, None])[1:, :-1]


def with_nan(ids, weights):
    return weights[:, None, :, None] * weights[:, None, None, :]


PADDING = torch.ones(G, S, dtype=torch.long)
PADDING[0, :4] = 0
PADDING[2, 15:] = 0
HOLES = (
    torch.zeros(G, S).masked_fill(torch.arange(S) > 11, float("nan")).masked_fill(torch.arange(S) < 4, float("-inf"))
)
HAND_MADE = [
    (index_mask, ()),
    (buffer_mask, ()),
    (triangle_of_lowest, ()),
    (triangle_of_ones, ()),
    (minus_infinity, ()),
    (inverted, (PADDING,)),
    (filled, (PADDING,)),
    (distance_window, ()),
    (same_chunk, ()),
    (sinks_and_window, ()),
    (remainder_mask, ()),
    (linear_bias, ()),
    (linear_bias_of_rows, (PADDING,)),
    (merged_heads, (PADDING,)),
    (key_padding, (PADDING,)),
    (shifted, ()),
    (with_nan, (HOLES,)),
]
WITH_ALL_VERDICTS = (
    *(index_mask, buffer_mask, triangle_of_lowest, triangle_of_ones),
    *(minus_infinity, inverted, shifted),
)
IDS = torch.zeros(G, S, dtype=torch.long)


@pytest.mark.parametrize(("function", "args"), HAND_MADE, ids=lambda item: getattr(item, "__name__", ""))
def test_blocks_of_hand_made_masks_equal_the_whole(function, args):
    traced = Traced(function, IDS, *args)
    check(traced.blocks(leaves), traced.whole, None, ALL_RANGES)
    verdicts = check_all(traced, unseen=UNSEEN)
    if function in WITH_ALL_VERDICTS:
        assert verdicts == {"all", "none", "mixed"}


ranges = st.tuples(st.integers(0, S), st.integers(0, S)).map(sorted)


@pytest.fixture(scope="module")
def traced_masks():
    return [Traced(function, IDS, *args) for function, args in HAND_MADE]


@settings(max_examples=25, deadline=None)
@given(
    which=st.integers(0, len(HAND_MADE) - 1),
    queries=ranges,
    keys=ranges,
    rows=st.sets(st.integers(0, G - 1), min_size=1),
)
def test_any_block_equals_the_whole(traced_masks, which, queries, keys, rows):
    traced, rows = traced_masks[which], sorted(rows)
    for light in (everything_small, leaves):
        check(traced.blocks(light, rows), traced.whole, rows, [(*queries, *keys)])


operations = st.sampled_from(
    [
        *("le", "lt", "ge", "gt", "eq", "ne", "logical_and", "logical_or", "logical_xor", "bitwise_and", "minimum"),
        *("add", "sub", "mul", "maximum", "div", "floor_divide", "remainder", "where", "masked_fill", "clamp"),
        *("neg", "abs", "logical_not", "float", "bool", "half", "long", "rsub"),
    ]
)
numbers = st.sampled_from([0, 1, 2, 7, -3, 0.5, 0.1, -1e30, float("-inf")])


@st.composite
def programs(draw):
    """Steps over a stack of values that starts with query and key positions and a padding mask."""
    return draw(
        st.lists(st.tuples(operations, *[st.integers(0, 20)] * 3, numbers, st.booleans()), min_size=1, max_size=8)
    )


def run_program(steps, padding):
    index = torch.arange(padding.shape[1])
    values = [
        index[:, None].float(),
        index[None, :],
        index[:, None],
        padding[:, None, None, :],
        padding[:, None, :, None],
    ]
    for name, a, b, c, number, plain in steps:
        x, y, z = (values[place % len(values)] for place in (a, b, c))
        other = number if plain else y
        if name in ("float", "bool", "half", "long"):
            if name == "long" and x.is_floating_point():
                continue  # undefined for what does not fit
            values.append(getattr(x, name)())
        elif name in ("neg", "abs", "logical_not"):
            values.append(getattr(torch, name)(x if name == "logical_not" else x + 0))
        elif name.startswith("logical") or name == "bitwise_and":
            values.append(getattr(torch, name)(x.bool(), y.bool()))
        elif name in ("minimum", "maximum"):
            values.append(getattr(torch, name)(x, y))
        elif name == "where":
            values.append(torch.where(z.bool(), x, other))
        elif name == "masked_fill":
            values.append((x + y).float().masked_fill(z.bool(), number))
        elif name == "clamp":
            values.append((x + y).float().clamp(min=number))
        elif name in ("floor_divide", "remainder"):
            values.append(getattr(torch, name)(x + y, 3))
        elif name == "div":
            values.append(torch.div(x + y, 3))
        else:
            values.append(getattr(torch, name)(x + 0, number if plain else y + 0))
    result = values[-1]
    result = result if result.is_floating_point() else result.bool()
    size = padding.shape[1]
    return torch.broadcast_to(result, (padding.shape[0], 1, size, size))


@settings(max_examples=25, deadline=None)
@given(steps=programs(), queries=ranges, keys=ranges, rows=st.sets(st.integers(0, G - 1), min_size=1))
def test_any_program_agrees_with_eager(steps, queries, keys, rows):
    fakes = fake_padding()
    graph = compat.to_aten(lambda padding: run_program(steps, padding), fakes)
    traced = object.__new__(Traced)
    traced.whole, rows = run_program(steps, PADDING), sorted(rows)
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    placeholder = next(iter(graph.graph.nodes))
    program = block_program(output.args[0], is_light=lambda node: node.op == "placeholder")
    traced_values = {placeholder: PADDING}
    values = [traced_values.get(node, {0: G, 1: S}.get(_size_dim(node))) for node in program.inputs]
    blocks = bind(program, values, rows)
    check(blocks, traced.whole, rows, [(*queries, *keys), *ALL_RANGES[::7]], single=False)


def _size_dim(node):
    return node.args[1] if node.op == "call_function" else None


def fake_padding():
    shape_env = torch.fx.experimental.symbolic_shapes.ShapeEnv()
    mode = torch._subclasses.FakeTensorMode(shape_env=shape_env)
    return [mode.from_tensor(PADDING)]


def test_causal_blocks_equal_the_triangle():
    whole = torch.ones(S, S, dtype=torch.bool).tril()
    assert check(CausalBlocks(), whole, None, ALL_RANGES) == {"all", "none", "mixed"}
    assert check(CausalBlocks(False), torch.ones(S, S, dtype=torch.bool), None, ALL_RANGES) == {"all"}
    assert check(EverySeen(), torch.ones(S, S, dtype=torch.bool), None, ALL_RANGES) == {"all"}


def test_both_masks_hold():
    causal, padding = CausalBlocks(), Traced(key_padding, IDS, PADDING)
    seen = padding.blocks(leaves)
    whole = torch.ones(S, S, dtype=torch.bool).tril() & padding.whole
    check(both(causal, seen), whole, None, ALL_RANGES)
    bias = Traced(inverted, IDS, PADDING)
    whole = bias.whole.masked_fill(~torch.ones(S, S, dtype=torch.bool).tril(), float("-inf"))
    check(both(causal, bias.blocks(leaves)), whole, None, ALL_RANGES)
    check(both(bias.blocks(leaves), causal), whole, None, ALL_RANGES)


def test_an_empty_block_is_not_seen():
    blocks = Traced(index_mask, IDS).blocks(leaves)
    assert blocks.verdict(4, 4, 0, 9) == blocks.verdict(4, 5, 2, 2) == CausalBlocks().verdict(3, 3, 0, 1) == "none"
    assert blocks.tensor(4, 4, 0, 9).shape == (1, 1, 0, 9)


def test_a_finite_floor_is_mixed_unless_the_caller_says_so():
    traced = Traced(triangle_of_lowest, IDS)
    assert traced.blocks(leaves).verdict(0, 4, 8, 12) == "mixed"
    for unseen in (HIDING, UNSEEN, -3e38):
        assert traced.blocks(leaves, unseen=unseen).verdict(0, 4, 8, 12) == "none"


def test_a_verdict_over_a_million_tokens_is_quick():
    length = 1 << 20
    config = PreTrainedConfig(attn_implementation="sdpa")
    padding = PADDING.bool()

    def build(embeds, padding):
        return masking_utils.create_causal_mask(config, embeds, padding, past_key_values=None)

    traced = Traced(build, torch.zeros(G, S, 8), padding)
    program = block_program(traced.output, is_light=leaves)
    long = torch.ones(G, length, dtype=torch.bool)
    long[:, :1000] = False
    values = [long if isinstance(traced.values[node], torch.Tensor) else G for node in program.inputs]
    blocks = bind(program, values)
    assert blocks.verdict(length - 64, length, 1024, length - 64) == "all"
    assert blocks.verdict(length - 64, length, 0, 1000) == "none"
    start = time.thread_time()
    for first in range(2000, 3000):
        blocks.verdict(length - first, length - first + 64, first, first + 700)
    assert time.thread_time() - start < 1.0  # 1 ms each

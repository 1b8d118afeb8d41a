"""From a mask's graph to a block program: what is demanded of whom, and what is refused."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from longstraw import compat
from longstraw.arch.masks import NotByBlocks, block_program
from longstraw.blocks import Count, Cut, Fill, Lookup, Read, Side

ROW, QUERY, KEY = Cut(Side.ROW), Cut(Side.QUERY), Cut(Side.KEY)
PADDING = torch.ones(3, 11, dtype=torch.long)


def program_of(function, *args, light=("placeholder",), **options):
    """The program of what the function returns for args [rows, tokens]; placeholders are light."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    graph = compat.to_aten(function, [mode.from_tensor(arg) for arg in args])
    output = next(node for node in graph.graph.nodes if node.op == "output").args[0]
    return block_program(output, is_light=lambda node: node.op in light or str(node.target) in light, **options)


def reads(program):
    return [step.cuts for step in program.steps if isinstance(step, Read) and step.cuts]


def test_a_value_is_read_once_for_each_side():
    program = program_of(lambda ids: ids[:, None, :, None] == ids[:, None, None, :], PADDING)
    assert [node.op for node in program.inputs] == ["placeholder"]
    assert sorted(map(str, reads(program))) == sorted(map(str, [(ROW, QUERY), (ROW, KEY)]))
    assert program.cuts == (ROW, None, QUERY, KEY)


def test_a_dim_of_one_is_not_cut():
    program = program_of(lambda ids: ids[:, None, None, :] > 0, PADDING)
    assert program.cuts == (ROW, None, None, KEY) and reads(program) == [(ROW, KEY)]


def test_only_the_blocks_size_is_created():
    def mask(ids):
        size = ids.shape[1]
        return torch.full((size, size), float("-inf")).triu(1)

    program = program_of(mask, PADDING)
    assert program.inputs == ()
    assert [step.shape for step in program.steps if isinstance(step, Fill)] == [(QUERY, KEY)]


def test_sizes_are_not_inputs():
    def mask(ids):
        rows, size = ids.shape
        index = torch.arange(size)
        return (index.view(1, size) <= index.view(size, 1)).expand(rows, 1, size, size)

    assert program_of(mask, PADDING).inputs == ()


def test_a_slice_moves_the_offset():
    def mask(ids):
        index = torch.arange(ids.shape[1] + 2)
        return (index[:, None] >= index[None, :])[2:, 1:-1]

    counts = {step.cut for step in program_of(mask, PADDING).steps if isinstance(step, Count)}
    assert counts == {Cut(Side.QUERY, offset=2), Cut(Side.KEY, offset=1)}


def test_heads_merged_with_rows_are_split_again():
    def mask(ids):
        rows, size = ids.shape
        return (ids[:, None, None, :] > 0).expand(rows, 4, size, size).reshape(rows * 4, size, size)

    program = program_of(mask, PADDING)
    assert program.cuts == (Cut(Side.ROW, inner=4), QUERY, KEY)
    assert reads(program) == [(ROW, KEY)]


def test_a_lookup_reads_its_source_whole():
    def mask(ids):
        rows, size = ids.shape
        row, token = torch.arange(rows)[:, None, None, None], torch.arange(size)
        return ids[row, token[:, None]] == ids[row, token[None, :]]

    program = program_of(mask, PADDING)
    assert reads(program) == [(None, None)] and sum(isinstance(step, Lookup) for step in program.steps) == 2


def test_tokens_may_lie_in_other_dims():
    program = program_of(lambda ids: ids[:, :, None, None] <= ids[:, None, :, None], PADDING, query_dim=1, key_dim=2)
    assert program.cuts == (ROW, QUERY, KEY, None)


def test_dim_zero_is_rows_only_where_the_row_size_divides_it():
    def mask(ids):
        return torch.arange(6)[:, None, None] * torch.arange(ids.shape[1])[None, None, :]

    assert program_of(mask, PADDING).cuts == program_of(mask, PADDING, row_size=4).cuts == (None, None, KEY)
    assert program_of(mask, PADDING, row_size=6).cuts == (ROW, None, KEY)


def test_a_program_prints_short():
    text = str(program_of(lambda ids: ids[:, None, :, None] == ids[:, None, None, :], PADDING))
    assert "read input 0 [row, query]" in text and "aten.eq.Tensor" in text


def needs_all_keys(ids):
    seen = ids[:, None, :, None] >= ids[:, None, None, :]
    return seen | (~seen).all(-1, keepdim=True)


def is_random(ids):
    return torch.rand_like((ids[:, None, :, None] * ids[:, None, None, :]).float()) > 0.5


def is_in_place(ids):
    mask = (ids[:, None, :, None] * ids[:, None, None, :]).float()
    mask.mul_(2.0)
    return mask.clone()[:, :, :, :] + torch.ops.aten.mul_(mask, 2.0)


def mixes_tokens(ids):
    outer = ids[:, None, :, None] * ids[:, None, None, :]
    rows, size = ids.shape
    return outer.view(rows, 1, size * size)[:, :, :, None].expand(rows, 1, size * size, size)


def steps_over_tokens(ids):
    size = ids.shape[1]
    return (torch.arange(2 * size)[:, None] <= torch.arange(size)[None, :])[::2]


def concatenates(ids):
    outer = ids[:, None, :, None] * ids[:, None, None, :]
    return torch.cat([outer, outer], -1)


@pytest.mark.parametrize(
    "function", [needs_all_keys, is_random, is_in_place, mixes_tokens, steps_over_tokens, concatenates]
)
def test_what_does_not_go_by_blocks_is_refused(function):
    with pytest.raises(NotByBlocks) as error:
        program_of(function, PADDING)
    assert isinstance(error.value.node, torch.fx.Node) and error.value.reason in str(error.value)


def test_a_value_that_is_not_light_is_refused():
    with pytest.raises(NotByBlocks, match="is not computed in the graph from token positions"):
        program_of(lambda ids: ids[:, None, :, None] * ids[:, None, None, :], PADDING, light=())

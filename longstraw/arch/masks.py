"""From the graph of a mask to a program for its blocks.

In: the node of a mask [rows or 1, heads or 1, S, S] (or with fewer leading dims), and which nodes are light, that is,
computed whole before anything else. Out: a `BlockProgram`. The demand "these dims are cut to the block" is pushed from
the mask back through each op to light nodes. An op without an entry in the table, or one that would need a token dim
whole, raises `NotByBlocks`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, cast

import sympy
import torch
from torch import fx

from longstraw.arch import factors
from longstraw.arch.rules import op_name
from longstraw.blocks import (
    BlockProgram,
    Call,
    Count,
    Cut,
    Cuts,
    Fill,
    Lookup,
    Read,
    Reshape,
    Side,
    Slot,
    Step,
    Triangle,
)
from longstraw.compat import expression

__all__ = ["NotByBlocks", "block_program"]

aten = torch.ops.aten


class NotByBlocks(Exception):
    """The mask can't be computed block by block: `node` is the op that stands in the way."""

    def __init__(self, node: fx.Node, reason: str) -> None:
        super().__init__(f"{op_name(node)} {reason}")
        self.node = node
        self.reason = reason


def block_program(
    node: fx.Node,
    *,
    is_light: Callable[[fx.Node], bool],
    query_dim: int = -2,
    key_dim: int = -1,
    row_size: int | torch.SymInt | sympy.Expr | None = None,
) -> BlockProgram:
    """Programs the blocks of the mask `node`. Light nodes become the program's inputs.

    Dim 0 counts rows where its size is a multiple of `row_size`. Without it: in a mask of four dims, and where the
    size is symbolic.
    """
    value = node.meta["val"]
    query_dim, key_dim = query_dim % value.ndim, key_dim % value.ndim
    cuts: list[Cut | None] = [None] * value.ndim
    cuts[query_dim], cuts[key_dim] = Cut(Side.QUERY), Cut(Side.KEY)
    if cuts[0] is None:
        cuts[0] = _row_cut(value, row_size)
    builder = _Builder(is_light)
    demand = _without_ones(value, cuts)
    output = builder.slot(node, demand)
    return BlockProgram(
        tuple(builder.inputs),
        tuple(builder.steps),
        output,
        demand,
        query_dim,
        key_dim,
        value.dtype,
        value.device,
        tuple(sorted(builder.zero_or_one)),
    )


def _row_cut(value: torch.Tensor, row_size: int | torch.SymInt | sympy.Expr | None) -> Cut | None:
    size = expression(value.shape[0])
    if row_size is not None:
        inner = size / expression(row_size)
        return Cut(Side.ROW, inner=int(inner)) if inner.is_Integer else None
    factor, rest = size.as_coeff_Mul()
    if value.ndim == 4:
        return Cut(Side.ROW)
    return None if rest == 1 else Cut(Side.ROW, inner=int(factor))


class _Builder:
    """The program so far."""

    def __init__(self, is_light: Callable[[fx.Node], bool]) -> None:
        self.is_light = is_light
        self.inputs: list[fx.Node] = []
        self.steps: list[Step] = []
        self.slots: dict[tuple[fx.Node, Cuts], Slot] = {}
        self.zero_or_one: set[int] = set()

    def slot(self, node: fx.Node, cuts: Sequence[Cut | None]) -> Slot:
        """Where the node's value, cut by `cuts`, is found."""
        value = node.meta.get("val")
        is_tensor = isinstance(value, torch.Tensor)
        if not is_tensor and not isinstance(value, (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise NotByBlocks(node, "is neither a tensor nor a number")
        demand = _without_ones(value, cuts) if isinstance(value, torch.Tensor) else ()
        if (node, demand) not in self.slots:
            if not is_tensor or self.is_light(node):
                self.slots[node, demand] = self.add(Read(self.input(node), demand))
            else:
                self.slots[node, demand] = self.compute(node, demand)
        return self.slots[node, demand]

    def input(self, node: fx.Node) -> int:
        if node not in self.inputs:
            self.inputs.append(node)
        return self.inputs.index(node)

    def add(self, step: Step) -> Slot:
        self.steps.append(step)
        return Slot(len(self.steps) - 1)

    def compute(self, node: fx.Node, cuts: Cuts) -> Slot:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            raise NotByBlocks(node, "is not computed in the graph from token positions, padding or constants")
        value = node.meta["val"]
        for dim, (size, cut) in enumerate(zip(value.shape, cuts, strict=True)):
            if cut is None and not expression(size).is_Integer:
                raise NotByBlocks(node, f"would have to be built whole along dim {dim} of {value.ndim}")
        if factors.is_unproven(node):
            whole = factors.origin(node, is_light=self.is_light)
            if whole is None:
                raise NotByBlocks(node, "multiplies scores by values that may be other than 0 and 1")
            self.zero_or_one.add(self.input(whole))
        rule = _RULES.get(node.target.overloadpacket)
        if rule is None and _is_elementwise(node.target):
            rule = _elementwise
        if rule is None:
            raise NotByBlocks(node, "is not known to work block by block")
        return rule(self, node, cuts)

    def operand(self, arg: Any, out_cuts: Cuts) -> Any:
        """An argument that is broadcast to the result's dims: a slot for a node, itself for a constant."""
        if isinstance(arg, fx.Node):
            value = arg.meta.get("val")
            ndim = value.ndim if isinstance(value, torch.Tensor) else 0
            return self.slot(arg, out_cuts[len(out_cuts) - ndim :])
        return arg

    def number(self, node: fx.Node, arg: Any) -> Any:
        """A number, or the slot of a node that gives one."""
        if isinstance(arg, fx.Node) and isinstance(arg.meta.get("val"), torch.Tensor):
            raise NotByBlocks(node, "takes a number from a tensor")
        return self.operand(arg, ())


_Rule = Callable[[_Builder, fx.Node, Cuts], Slot]


def _elementwise(builder: _Builder, node: fx.Node, cuts: Cuts) -> Slot:
    op = node.target
    assert isinstance(op, torch._ops.OpOverload)
    value = node.meta["val"]
    nested = [item for arg in node.args if isinstance(arg, (list, tuple)) for item in arg]
    if op._schema.is_mutable or not isinstance(value, torch.Tensor) or any(isinstance(i, fx.Node) for i in nested):
        raise NotByBlocks(node, "is not known to work block by block")
    args = tuple(builder.operand(arg, cuts) for arg in node.args)
    kwargs = {name: builder.operand(arg, cuts) for name, arg in node.kwargs.items()}
    return builder.add(Call(op, args, kwargs, value.dtype, _common_dtype(node)))


def _cast(builder: _Builder, node: fx.Node, cuts: Cuts) -> Slot:
    """to, type_as: the dtype and the device of the result."""
    source, value = _source(node), node.meta["val"]
    slot, given = builder.slot(source, cuts), source.meta["val"]
    if given.dtype == value.dtype and given.device == value.device:
        return slot
    args = (slot, value.device, value.dtype)
    return builder.add(Call(aten.to.device, args, {}, value.dtype, value.dtype))


def _common_dtype(node: fx.Node) -> torch.dtype:
    operands = [arg.meta.get("val") if isinstance(arg, fx.Node) else arg for arg in node.args]
    operands = [1 if isinstance(item, torch.SymInt) else item for item in operands]
    if len(operands) == 2 and all(isinstance(item, (torch.Tensor, int, float)) for item in operands):
        return torch.result_type(*cast(Any, operands))
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor)
    return value.dtype


def _same_elements(builder: _Builder, node: fx.Node, cuts: Cuts) -> Slot:
    """view, reshape, unsqueeze, squeeze, flatten: solved on the sizes."""
    source = _source(node)
    demand = _before_view(node, source.meta["val"].shape, node.meta["val"].shape, cuts)
    slot = builder.slot(source, demand)
    before = builder.steps[slot.index]
    if isinstance(before, Reshape) and not before.expand:
        slot = before.source
    return builder.add(Reshape(slot, _block_shape(node, cuts), expand=False))


def _before_view(node: fx.Node, before: Sequence[Any], after: Sequence[Any], cuts: Cuts) -> Cuts:
    ins = [dim for dim, size in enumerate(before) if expression(size) != 1]
    outs = [dim for dim, size in enumerate(after) if expression(size) != 1]
    demand: list[Cut | None] = [None] * len(before)
    while ins or outs:
        num_in, num_out = _next_group([before[dim] for dim in ins], [after[dim] for dim in outs], node)
        group_in, ins = ins[:num_in], ins[num_in:]
        group_out, outs = outs[:num_out], outs[num_out:]
        cut = cuts[group_out[0]]
        if any(cuts[dim] is not None for dim in group_out[1:]):
            raise NotByBlocks(node, "merges or splits a dim of tokens")
        if cut is None:
            continue
        inner_out, inner_in = (
            _product(sizes[dim] for dim in group[1:]) for sizes, group in ((after, group_out), (before, group_in))
        )
        if (num_in, num_out) == (1, 1):
            demand[group_in[0]] = cut
        elif (
            cut.side is Side.ROW
            and inner_out.is_Integer
            and inner_in.is_Integer
            and (cut.inner * inner_out) % inner_in == 0
        ):
            demand[group_in[0]] = Cut(Side.ROW, inner=int(cut.inner * inner_out // inner_in))
        else:
            raise NotByBlocks(node, "merges or splits a dim of tokens")
    return tuple(demand)


def _next_group(before: Sequence[Any], after: Sequence[Any], node: fx.Node) -> tuple[int, int]:
    """How many leading dims on each side have the same number of elements: the fewest."""
    counts = itertools.product(range(1, len(before) + 1), range(1, len(after) + 1))
    for num_in, num_out in sorted(counts, key=sum):
        if sympy.expand(_product(before[:num_in]) - _product(after[:num_out])) == 0:
            return num_in, num_out
    raise NotByBlocks(node, "has sizes that can't be matched")


def _expand(builder: _Builder, node: fx.Node, cuts: Cuts) -> Slot:
    source = _source(node)
    sizes = source.meta["val"].shape
    for size, out in zip(reversed(sizes), reversed(node.meta["val"].shape), strict=False):
        if expression(size) not in (1, expression(out)):
            raise NotByBlocks(node, "repeats a dim that is larger than 1")
    slot = builder.slot(source, cuts[len(cuts) - len(sizes) :])
    return builder.add(Reshape(slot, _block_shape(node, cuts), expand=True))


def _permute(builder: _Builder, node: fx.Node, cuts: Cuts) -> Slot:
    source, value = _source(node), node.meta["val"]
    order = list(range(value.ndim))
    if node.target is aten.permute.default:
        order = [dim % value.ndim for dim in _constants(node, node.args[1])]
    elif value.ndim > 1:
        first, second = (0, 1) if node.target is aten.t.default else _constants(node, node.args[1:3])
        order[first], order[second] = order[second], order[first]
    demand: list[Cut | None] = [None] * value.ndim
    for out_dim, in_dim in enumerate(order):
        demand[in_dim] = cuts[out_dim]
    slot = builder.slot(source, demand)
    return builder.add(Call(aten.permute.default, (slot, order), {}, value.dtype, value.dtype))


def _slice(builder: _Builder, node: fx.Node, cuts: Cuts) -> Slot:
    """A dim that is cut keeps its tokens' numbers: the start is added to the offset. Others are sliced as they are."""
    source, value = _source(node), node.meta["val"]
    dim, start, end, step = _filled(node.args[1:], (0, None, None, 1))
    dim = dim % value.ndim
    cut = cuts[dim]
    if cut is None:
        if expression(source.meta["val"].shape[dim]) == expression(value.shape[dim]) == 1:
            return builder.slot(source, cuts)
        args = (builder.slot(source, cuts), dim, *(builder.number(node, arg) for arg in (start, end, step)))
        return builder.add(Call(aten.slice.Tensor, args, {}, value.dtype, value.dtype))
    start = start.meta["val"] if isinstance(start, fx.Node) else start
    first = expression(0 if start is None else start)
    if not first.is_Integer or first < 0 or step != 1 or (first != 0 and (cut.side is Side.ROW or cut.inner != 1)):
        raise NotByBlocks(node, "slices tokens or rows from a place that is not a constant, or with a step")
    demand = list(cuts)
    demand[dim] = Cut(cut.side, cut.inner, cut.offset + int(first))
    return builder.slot(source, demand)


def _slice_scatter(builder: _Builder, node: fx.Node, cuts: Cuts) -> Slot:
    source = node.args[1]
    assert isinstance(source, fx.Node)
    dim, start, _, step = _filled(node.args[2:], (0, None, None, 1))
    sizes, whole = source.meta["val"].shape, node.meta["val"].shape
    if start not in (None, 0) or step != 1 or expression(sizes[dim]) != expression(whole[dim]):
        raise NotByBlocks(node, "writes into a part of the mask")
    return builder.slot(source, cuts)


def _select(builder: _Builder, node: fx.Node, cuts: Cuts) -> Slot:
    source, value = _source(node), node.meta["val"]
    dim, index = node.args[1:3]
    (dim,) = _constants(node, [dim])
    dim = dim % (value.ndim + 1)
    slot = builder.slot(source, (*cuts[:dim], None, *cuts[dim:]))
    return builder.add(Call(aten.select.int, (slot, dim, builder.number(node, index)), {}, value.dtype, value.dtype))


def _fill(builder: _Builder, node: fx.Node, cuts: Cuts) -> Slot:
    name, value = str(node.target).split(".")[1], node.meta["val"]
    if name in ("full", "full_like", "new_full", "scalar_tensor"):
        place = {"full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0}[name]
        fill = builder.number(node, node.args[place] if len(node.args) > place else node.kwargs["fill_value"])
    else:
        fill = int("ones" in name)
    return builder.add(Fill(_block_shape(node, cuts), fill, value.dtype, value.device))


def _arange(builder: _Builder, node: fx.Node, cuts: Cuts) -> Slot:
    value, (cut,) = node.meta["val"], cuts
    if cut is None:  # a constant size
        args = tuple(builder.number(node, arg) for arg in node.args)
        return builder.add(Call(node.target, args, node.kwargs, value.dtype, value.dtype))  # type: ignore[arg-type]
    start, step = node.args[0] if len(node.args) > 1 else 0, node.args[2] if len(node.args) > 2 else 1
    start, step = builder.number(node, start), builder.number(node, step)
    num_rows = builder.number(node, node.args[min(1, len(node.args) - 1)]) if cut.side is Side.ROW else None
    whole = (torch.int64, torch.int32)
    if cut.inner != 1 or value.dtype not in whole or (num_rows is not None and (start, step) != (0, 1)):
        raise NotByBlocks(node, "counts something other than rows or tokens")
    return builder.add(Count(cut, start, step, num_rows, value.dtype, value.device))


def _triangle(builder: _Builder, node: fx.Node, cuts: Cuts) -> Slot:
    rows, columns = cuts[-2:]
    if rows is None or columns is None or rows.inner != 1 or columns.inner != 1:
        raise NotByBlocks(node, "has a diagonal that does not run over query and key tokens")
    diagonal = builder.number(node, node.args[1] if len(node.args) > 1 else node.kwargs.get("diagonal", 0))
    upper = node.target is aten.triu.default
    return builder.add(Triangle(builder.slot(_source(node), cuts), rows, columns, upper, diagonal))


def _index(builder: _Builder, node: fx.Node, cuts: Cuts) -> Slot:
    """`source[indices]`: the demand goes to the indices; the source is light and whole along the indexed dims."""
    source, indices = _source(node), node.args[1]
    assert isinstance(indices, (list, tuple))
    if not builder.is_light(source):
        raise NotByBlocks(node, "looks tokens up in something that is not computed per token")
    places = [place for place, index in enumerate(indices) if index is not None]
    values = [index.meta["val"] for index in indices if isinstance(index, fx.Node)]
    if not places or any(value.dtype in (torch.bool, torch.uint8) for value in values):
        raise NotByBlocks(node, "selects by a mask")
    adjacent = places == list(range(places[0], places[-1] + 1))
    ndim, first = max(value.ndim for value in values), places[0] if adjacent else 0
    index_cuts, kept = cuts[first : first + ndim], [*cuts[:first], *cuts[first + ndim :]]
    slots = tuple(None if index is None else builder.operand(index, index_cuts) for index in indices)
    source_ndim = source.meta["val"].ndim
    demand = [None if dim in places else kept.pop(0) for dim in range(source_ndim)]
    return builder.add(Lookup(builder.slot(source, demand), slots))


def _same(builder: _Builder, node: fx.Node, cuts: Cuts) -> Slot:
    return builder.slot(_source(node), cuts)


def _is_elementwise(op: torch._ops.OpOverload) -> bool:
    return torch.Tag.pointwise in op.tags and torch.Tag.nondeterministic_seeded not in op.tags


_VIEWS = (
    *(aten.view, aten.reshape, aten._unsafe_view, aten.view_as, aten.flatten, aten.unflatten),
    *(aten.unsqueeze, aten.squeeze),
)
_COPIES = (
    *(aten.alias, aten.detach, aten.detach_, aten.contiguous, aten.clone),
    *(aten.lift_fresh, aten.lift_fresh_copy),
)
_FILLS = (
    *(aten.full, aten.ones, aten.zeros, aten.scalar_tensor, aten.new_full, aten.new_ones, aten.new_zeros),
    *(aten.full_like, aten.ones_like, aten.zeros_like),
)
_ELEMENTWISE = (  # composite ops, which carry no pointwise tag
    *(aten.where, aten.masked_fill, aten.__and__, aten.__or__, aten.__xor__, aten.floor_divide),
    *(aten.less, aten.less_equal, aten.greater, aten.greater_equal, aten.not_equal),
    *(aten.rsub, aten.subtract, aten.multiply, aten.negative, aten.absolute, aten.true_divide, aten.divide, aten.clip),
)
_RULES: dict[Any, _Rule] = {
    **dict.fromkeys(_VIEWS, _same_elements),
    **dict.fromkeys(_FILLS, _fill),
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys((aten.expand, aten.expand_as, aten.broadcast_to, aten.repeat), _expand),
    **dict.fromkeys((aten.permute, aten.transpose, aten.t, aten.swapaxes), _permute),
    **dict.fromkeys(_COPIES, _same),
    **dict.fromkeys((aten.tril, aten.triu), _triangle),
    **dict.fromkeys((aten.to, aten.type_as, aten._to_copy), _cast),
    aten.slice: _slice,
    aten.slice_scatter: _slice_scatter,
    aten.select: _select,
    aten.arange: _arange,
    aten.index: _index,
}


def _source(node: fx.Node) -> fx.Node:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def _constants(node: fx.Node, values: Any) -> list[int]:
    if not all(isinstance(value, int) for value in values):
        raise NotByBlocks(node, "takes a dim that is not a constant")
    return list(values)


def _filled(args: Sequence[Any], defaults: Sequence[Any]) -> tuple[Any, ...]:
    return (*args, *defaults[len(args) :])


def _block_shape(node: fx.Node, cuts: Cuts) -> tuple[int | Cut, ...]:
    """The shape of the node's block; every symbolic dim is cut."""
    return tuple(
        int(expression(size)) if cut is None else cut for size, cut in zip(node.meta["val"].shape, cuts, strict=True)
    )


def _without_ones(value: torch.Tensor, cuts: Sequence[Cut | None]) -> Cuts:
    """A dim of size 1 is broadcast: it is not cut."""
    return tuple(None if expression(size) == 1 else cut for size, cut in zip(value.shape, cuts, strict=True))


def _product(sizes: Any) -> sympy.Expr:
    result: sympy.Expr = sympy.Integer(1)
    for size in sizes:
        result = result * expression(size)
    return result

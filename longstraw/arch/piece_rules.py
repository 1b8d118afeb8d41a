"""The table of what each op makes of a whole dim, where a loop applies it to one piece of that dim at a time."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.node import map_arg

from longstraw.arch.aten import is_pointwise
from longstraw.arch.pieces import PieceOp, PieceRule, Unlike, Whole, rank_of, shape_of
from longstraw.arch.rules import arguments, packet, tensors

aten = torch.ops.aten


def pointwise(op: PieceOp) -> Whole:
    """Elementwise on operands broadcast against one another."""
    rank = rank_of(op.first)
    operands = tensors((op.first.args, op.first.kwargs))
    wholes = [x for x in operands if isinstance(op.operands[x], Whole)]
    if len({node.meta["val"].device for node in (op.first, *wholes)}) > 1:
        raise Unlike  # a number may lie on another device than the tensor it is combined with, a dim of numbers not
    if any(rank_of(x) == 0 for x in wholes) and len({x.meta["val"].dtype for x in operands}) > 1:
        raise Unlike  # nor does it count for the dtype that is computed in
    if op.stacked:
        lined = {x: op.lined_up(x, rank) for x in wholes}
        args, kwargs = map_arg((op.first.args, op.first.kwargs), lambda x: lined.get(x, x))
        return Whole(op.emit(op.first.target, *args, **kwargs), None, op.sizes)
    places = {op.whole(x).dim - rank_of(x) for x in wholes}  # type: ignore[operator]
    if len(places) != 1:
        raise Unlike
    place = places.pop()
    for x in operands:
        if x not in wholes and rank_of(x) + place >= 0 and shape_of(x)[place] != 1:
            raise Unlike
    return op.again(place + rank)


def like_first(op: PieceOp) -> Whole:
    """Casts, and new values of the same sizes."""
    return op.again(op.only(op.first.args[0]).dim)


def filled(op: PieceOp) -> Whole:
    """`masked_fill` with a number that is a tensor."""
    if rank_of(arguments(op.first)["value"]) != 0:
        raise Unlike
    op.shared(arguments(op.first)["value"])
    return pointwise(op)


def reduced(op: PieceOp) -> Whole:
    """Sums, maxima, softmax, sorts: along other dims."""
    a = arguments(op.first)
    source = a["self"] if "self" in a else a["input"]
    whole, rank = op.only(source), rank_of(source)
    if not rank:
        raise Unlike
    dim = a.get("dim")
    if dim is None or dim == []:
        return _reduced_to_one(op)
    dims = op.dims(dim, rank, whole)
    moved = [d + op.shift for d in dims]
    left = None if whole.dim is None else whole.dim - (rank - rank_of(op.first) and sum(d < whole.dim for d in dims))
    return op.again(left, dim=moved[0] if isinstance(dim, int) else moved)


def _reduced_to_one(op: PieceOp) -> Whole:
    over_dims = {aten.sum.default: aten.sum.dim_IntList, aten.mean.default: aten.mean.dim}
    target, source = over_dims.get(op.first.target), op.first.args[0]  # type: ignore[call-overload]
    if target is None or not op.stacked:
        raise Unlike
    dims = list(range(1, rank_of(source) + 1))  # type: ignore[arg-type]
    return Whole(op.emit(target, source, dims, **op.first.kwargs), None, op.sizes)


def gathered(op: PieceOp) -> Whole:
    """Entries along another dim."""
    a = arguments(op.first)
    table, index = op.whole(a["self"]), op.whole(a["index"])
    if table.dim != index.dim or not rank_of(a["self"]) or not rank_of(a["index"]):
        raise Unlike
    (d,) = op.dims(a["dim"], rank_of(a["self"]), table)
    return op.again(table.dim, dim=d + op.shift)


def embedding(op: PieceOp) -> Whole:
    """Entries of one table."""
    a = arguments(op.first)
    op.shared(a["weight"])
    if a["scale_grad_by_freq"]:
        raise Unlike  # the gradient counts how often a token stands in the piece
    return op.again(op.whole(a["indices"]).dim)


def linear(op: PieceOp) -> Whole:
    """Products with one matrix."""
    a = arguments(op.first)
    op.shared(a["weight"])
    op.shared(a["bias"])
    whole = op.whole(a["input"])
    if rank_of(a["weight"]) != 2:
        raise Unlike
    op.dims(-1, rank_of(a["input"]), whole)
    return op.again(whole.dim)


def matmul(op: PieceOp) -> Whole:
    """Products with one matrix on the right."""
    left, right = tensors(op.first.args)
    op.shared(right)
    whole = op.whole(left)
    if rank_of(right) != 2:
        raise Unlike
    op.dims(-1, rank_of(left), whole)
    return Whole(op.emit(aten.matmul.default, left, right), whole.dim, op.sizes)


def unsqueezed(op: PieceOp) -> Whole:
    """A new dim of size 1."""
    source, dim = op.first.args
    whole = op.only(source)
    d = dim % (rank_of(source) + 1)  # type: ignore[operator, arg-type]
    return op.again(None if whole.dim is None else whole.dim + (d <= whole.dim), dim=d + op.shift)


def squeezed(op: PieceOp) -> Whole:
    """Other dims of size 1 left out."""
    source = op.first.args[0]
    whole, rank, shape = op.only(source), rank_of(source), shape_of(source)  # type: ignore[arg-type]
    asked = op.first.args[1] if len(op.first.args) > 1 else [d for d, size in enumerate(shape) if size == 1]
    if not rank:
        raise Unlike
    dims = [d for d in op.dims(asked, rank, whole) if shape[d] == 1]
    if not dims or (len(op.first.args) == 1 and 1 in whole.sizes and not op.stacked):
        raise Unlike
    left = None if whole.dim is None else whole.dim - sum(d < whole.dim for d in dims)
    node = op.emit(aten.squeeze.dims, source, [d + op.shift for d in dims])
    return Whole(node, left, op.sizes)


def permuted(op: PieceOp) -> Whole:
    """Dims in another order."""
    source, *asked = op.first.args
    whole, rank = op.only(source), rank_of(source)  # type: ignore[arg-type]
    name = packet(op.first.target)
    if name is aten.permute:
        order = op.all_dims(asked[0], rank)
    else:
        if rank < 2:
            raise Unlike
        one, two = op.all_dims(asked if name is aten.transpose else (-2, -1), rank)
        order = list(range(rank))
        order[one], order[two] = two, one
    moved = [0, *(d + 1 for d in order)] if op.stacked else order
    node = op.emit(aten.permute.default, source, moved)
    return Whole(node, None if whole.dim is None else order.index(whole.dim), op.sizes)


def cut(op: PieceOp) -> Whole:
    """One entry (`select`) or a range (`slice`) of another dim."""
    a = arguments(op.first)
    whole, rank = op.only(a["self"]), rank_of(a["self"])
    (d,) = op.dims(a["dim"], rank, whole)
    gone = rank - rank_of(op.first)
    return op.again(None if whole.dim is None else whole.dim - gone * (d < whole.dim), dim=d + op.shift)


def reshaped(op: PieceOp) -> Whole:
    """The same entries under other sizes."""
    source = op.first.args[0]
    whole = op.only(source)
    columns = list(zip(*(sizes_asked(node) for node in op.nodes), strict=True))
    if op.stacked:
        sizes = [len(op.nodes), *(op.common(column) for column in columns)]
        return Whole(op.emit(aten.reshape.default, source, sizes), None, op.sizes)
    dim = whole.dim
    assert dim is not None
    new = shape_of(op.first)
    if len(new) <= dim or new[:dim] != shape_of(source)[:dim]:  # type: ignore[arg-type]
        raise Unlike
    # Entries stay in their order: what follows that dim may be joined to it, or be taken apart from it.
    pieces = tuple(shape_of(node)[dim] for node in op.nodes)
    times = sympy.sympify(pieces[0] / whole.sizes[0]) if whole.sizes[0] != 0 else sympy.nan
    if not (times.is_integer or (1 / times).is_integer) or any(
        sympy.expand(size * times - piece) != 0 for size, piece in zip(whole.sizes, pieces, strict=True)
    ):
        raise Unlike
    sizes = [-1 if i == dim else _known(op, i, column) for i, column in enumerate(columns)]
    return Whole(op.emit(aten.reshape.default, source, sizes), dim, pieces)


def _known(op: PieceOp, i: int, column: Sequence[Any]) -> Any:
    """Return a size of `reshape` that is the same for every piece, and not left to be found out."""
    size = op.common(column)
    if isinstance(size, int) and size < 0:
        size = op.first.meta["val"].shape[i]
    if not isinstance(size, (int, fx.Node)):
        raise Unlike
    return size


def expanded(op: PieceOp) -> Whole:
    """Other dims of size 1 repeated."""
    source = op.first.args[0]
    whole, rank = op.only(source), rank_of(op.first)
    columns = list(zip(*(sizes_asked(node) for node in op.nodes), strict=True))
    if op.stacked:
        lined = op.lined_up(source, rank)  # type: ignore[arg-type]
        sizes = [len(op.nodes), *(op.common(column) for column in columns)]
        return Whole(op.emit(aten.expand.default, lined, sizes), None, op.sizes)
    assert whole.dim is not None
    dim = whole.dim + rank - rank_of(source)  # type: ignore[arg-type]
    sizes = [-1 if i == dim else op.common(column) for i, column in enumerate(columns)]
    return Whole(op.emit(aten.expand.default, source, sizes), dim, op.sizes)


def one_of_several(op: PieceOp) -> Whole:
    """One of several results."""
    source, index = op.first.args
    whole = op.whole(source)
    return Whole(op.emit(operator.getitem, source, index), whole.dim, op.sizes)


def sizes_asked(node: fx.Node) -> Sequence[Any]:
    """Return the sizes in a node's arguments, which may differ from piece to piece; none for most ops."""
    if node.target not in _SIZED or len(node.args) != 2 or node.kwargs:
        return ()
    return node.args[1]  # type: ignore[return-value]


_SIZED = (aten.reshape.default, aten.view.default, aten._unsafe_view.default, aten.expand.default)


def _table() -> dict[Any, PieceRule]:
    groups: list[tuple[str, PieceRule]] = [
        ("to _to_copy detach zeros_like ones_like full_like", like_first),
        ("floor_divide", pointwise),
        ("masked_fill", filled),
        (
            "sum mean amax amin max min prod logsumexp softmax log_softmax _softmax _log_softmax _safe_softmax argmax "
            "argmin cumsum any all var std linalg_vector_norm topk sort argsort",
            reduced,
        ),
        ("gather", gathered),
        ("embedding", embedding),
        ("linear", linear),
        ("matmul mm", matmul),
        ("unsqueeze", unsqueezed),
        ("squeeze", squeezed),
        ("transpose permute t mT", permuted),
        ("select slice narrow", cut),
    ]
    table = {getattr(aten, name): rule for names, rule in groups for name in names.split() if hasattr(aten, name)}
    return {**table, **dict.fromkeys(_SIZED, reshaped), aten.expand.default: expanded, operator.getitem: one_of_several}


RULES: dict[Any, PieceRule] = _table()


def is_pure(target: Any) -> bool:
    """Return whether an op, given the same, returns the same and does nothing else."""
    schema = getattr(target, "_schema", None)
    return schema is not None and not schema.is_mutable and torch.Tag.nondeterministic_seeded not in target.tags


def rule_for(target: Any) -> PieceRule:
    """Return the rule for an op."""
    if target is not operator.getitem and not is_pure(target):
        raise Unlike
    rule = pointwise if is_pointwise(target) else RULES.get(target) or RULES.get(packet(target))
    if rule is None:
        raise Unlike
    return rule

"""What an op makes of a whole dim, where a loop applies it to one piece of that dim at a time.

A loop over rows leaves k copies of its body in the graph. The k values at one place of the body, one for each piece,
are a `Whole`: either the entries of the whole value's first dim, or consecutive ranges of one of its dims. A rule
`rule(op) -> Whole` answers for an op that was applied to such pieces: the same op on whole values. It raises `Unlike`
where its results are not the pieces of one value: the op reduces over the dim, cuts it, or is not in the table.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.node import map_arg

from longstraw.arch.aten import is_pointwise
from longstraw.arch.rules import arguments, emit, packet, tensors
from longstraw.compat import expression

aten = torch.ops.aten


class Unlike(Exception):
    """The values of a loop are not the pieces of one value, or it can't be told that they are."""


@dataclass(frozen=True)
class Whole:
    """One value in place of k.

    Attributes:
        node: the value.
        dim: which of its dims the pieces are ranges of; None where piece i is `node[i]`.
        sizes: the pieces' sizes along that dim, in order; without it one 1 for each piece.
    """

    node: fx.Node
    dim: int | None
    sizes: tuple[sympy.Expr, ...]


class PieceOp:
    """An op that a loop applied to pieces.

    Args:
        nodes: the op's node of every pass through the loop.
        operands: what stands for each operand of the first one: a `Whole`, or a node that all passes share.
    """

    def __init__(self, nodes: Sequence[fx.Node], operands: Mapping[fx.Node, Whole | fx.Node]) -> None:
        self.nodes, self.first, self.operands = nodes, nodes[0], operands
        wholes = [x for x in operands.values() if isinstance(x, Whole)]
        self.stacked, self.sizes = wholes[0].dim is None, wholes[0].sizes
        if any((x.dim is None) != self.stacked or x.sizes != self.sizes for x in wholes):
            raise Unlike

    @property
    def shift(self) -> int:
        """How much further right a piece's dims lie in the whole value."""
        return int(self.stacked)

    def whole(self, node: Any) -> Whole:
        """Return what stands for an operand that differs from piece to piece."""
        found = self.operands.get(node)
        if not isinstance(found, Whole):
            raise Unlike
        return found

    def only(self, node: Any) -> Whole:
        """Return what stands for the only operand."""
        if set(tensors((self.first.args, self.first.kwargs))) != {node}:
            raise Unlike
        return self.whole(node)

    def shared(self, node: fx.Node | None) -> None:
        """Raise unless an operand is the same for all pieces."""
        if node is not None and isinstance(self.operands.get(node), Whole):
            raise Unlike

    def dims(self, value: Any, rank: int, apart: Whole) -> list[int]:
        """Return one or more dims of a piece, counted from its first; none may be the dim that is in pieces."""
        found = self.all_dims([value] if isinstance(value, int) else value, rank)
        if apart.dim in found:
            raise Unlike
        return found

    def all_dims(self, dims: Any, rank: int) -> list[int]:
        """Return dims of a piece, counted from its first."""
        return [d % rank for d in dims]

    def emit(self, target: Any, /, *args: Any, **kwargs: Any) -> fx.Node:
        """Insert an op; operands of the first node in its arguments stand for whole values."""

        def current(node: fx.Node) -> fx.Node:
            found = self.operands.get(node, node)
            return found.node if isinstance(found, Whole) else found

        args, kwargs = map_arg((args, kwargs), current)
        return emit(self.first.graph, self.first, target, *args, **kwargs)

    def again(self, dim: int | None, /, **changed: Any) -> Whole:
        """Apply the op itself to whole values, with other values for the arguments named."""
        schema = self.first.target._schema  # type: ignore[union-attr]
        args, kwargs = list(self.first.args), {**self.first.kwargs}
        for i, argument in enumerate(schema.arguments):
            if argument.name in changed:
                if i < len(args):
                    args[i] = changed[argument.name]
                else:
                    kwargs[argument.name] = changed[argument.name]
        return Whole(self.emit(self.first.target, *args, **kwargs), dim, self.sizes)

    def lined_up(self, node: fx.Node, rank: int) -> fx.Node:
        """Return the whole of stacked pieces with dims of size 1 put before the pieces' own, up to a rank."""
        found = self.whole(node).node
        for _ in range(rank - rank_of(node)):
            found = self.emit(aten.unsqueeze.default, found, 1)
        return found

    def common(self, sizes: Sequence[Any]) -> Any:
        """Return a size that is the same for every piece."""
        values = [x.meta["val"] if isinstance(x, fx.Node) else x for x in sizes]
        if any(expression(value) != expression(values[0]) for value in values):
            raise Unlike
        return sizes[0]


PieceRule = Callable[[PieceOp], Whole]


def rank_of(node: fx.Node) -> int:
    """Return how many dims a node's value has, or the first of its values."""
    value = node.meta["val"]
    return (value[0] if isinstance(value, (tuple, list)) else value).ndim


def shape_of(node: fx.Node) -> list[sympy.Expr]:
    """Return a node's sizes."""
    return [expression(size) for size in node.meta["val"].shape]


def is_whole(op: PieceOp, found: Whole) -> bool:
    """Return whether a whole value has the sizes and dtypes that its pieces ask for."""
    values = [found.node.meta["val"], *(node.meta["val"] for node in op.nodes)]
    several = [value if isinstance(value, (tuple, list)) else (value,) for value in values]
    if any(len(value) != len(several[0]) for value in several):
        return False
    return all(_fits(whole, pieces, found) for whole, *pieces in zip(*several, strict=True))


def _fits(whole: torch.Tensor, pieces: Sequence[torch.Tensor], found: Whole) -> bool:
    shape = [expression(size) for size in whole.shape]
    for piece, size in zip(pieces, found.sizes, strict=True):
        own = [expression(x) for x in piece.shape]
        expected = shape[1:] if found.dim is None else [*shape[: found.dim], size, *shape[found.dim + 1 :]]
        if own != expected or piece.dtype != whole.dtype or piece.device != whole.device:
            return False
    total = len(pieces) if found.dim is None else sympy.Add(*found.sizes)
    return sympy.expand(shape[found.dim or 0] - total) == 0


# --- the rules --------------------------------------------------------------------------------------------------------


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

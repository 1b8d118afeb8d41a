"""What an op makes of a whole dim, where a loop applies it to one piece of that dim at a time.

A loop over rows leaves k copies of its body in the graph. The k values at one place of the body, one for each piece,
are a `Whole`: either the entries of the whole value's first dim, or consecutive ranges of one of its dims. A rule
`rule(op) -> Whole` answers for an op that was applied to such pieces: the same op on whole values. It raises `Unlike`
where its results are not the pieces of one value: the op reduces over the dim, cuts it, or is not in the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.node import map_arg

from longstraw.arch.rules import emit, tensors
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

"""Brings an attention's operands to four dims: `[rows, heads, tokens, width]`, masks `[rows, heads, queries, keys]`.

Models group heads in dims of their own: `[rows, key heads, group, tokens, width]`, keys broadcast over the group, or
the group before the key heads. `longstraw.ops.attention` has one dim of heads, in which consecutive queries share a
key. Used by `arch/attention.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import fx

from longstraw.arch.rules import emit
from longstraw.arch.selection import with_rank
from longstraw.compat import expression

aten = torch.ops.aten

GiveUp = Callable[[str], NoReturn]


class Heads:
    """How the dims between rows and tokens of one attention become its heads. Inserts at the graph's insertion point.

    Args:
        graph: where nodes are inserted.
        operands: queries, keys and values, `[..., tokens, width]`.
        batch: rows and heads, where operands or masks have both in one dim, or None.
        plain: whether nothing but masks depends on the heads: they may then change places.
        give_up: refuses the attention for a reason.

    Attributes:
        operands: queries, keys and values, `[rows, heads, tokens, width]`.
    """

    def __init__(
        self, graph: fx.Graph, operands: Sequence[fx.Node], *, batch: Any, plain: bool, give_up: GiveUp
    ) -> None:
        self._graph, self._batch = graph, batch
        for node in operands:
            if not 3 <= node.meta["val"].ndim <= 5:
                give_up(f"an operand has {node.meta['val'].ndim} dims")
        self._flat = batch is None and all(node.meta["val"].ndim == 3 for node in operands)
        lifted = [self._lifted(node) for node in operands]
        self._rank = max(node.meta["val"].ndim for node in lifted)
        lifted = [with_rank(graph, node, self._rank) for node in lifted]
        dims = [_head_dims(node) for node in lifted]
        keys_repeat_first = all(first == 1 for first, *_ in dims[1:]) and any(second != 1 for *_, second in dims[1:])
        self._swapped = plain and self._rank == 5 and dims[0][0] != 1 and keys_repeat_first
        if self._swapped:
            lifted = [self._swap(node) for node in lifted]
            dims = [_head_dims(node) for node in lifted]
        self._common = tuple(max(sizes) for sizes in zip(*dims, strict=True))
        query, key, value = lifted
        self.operands = [self._joined(self._expanded(query)), *(self._joined(self._repeated(x)) for x in (key, value))]

    @property
    def count(self) -> int:
        """Number of heads of the queries."""
        return int(self.operands[0].meta["val"].shape[1])

    def mask(self, node: fx.Node) -> fx.Node:
        """Return what is combined with the scores as `[rows, heads, queries, keys]`, without dims if it has no heads.

        Args:
            node: a mask, a bias or a factor of the scores, which broadcasts to them.
        """
        if node.meta["val"].ndim <= 2:
            return with_rank(self._graph, node, 2)
        if node.meta["val"].ndim == 3 and self._rank == 4:
            return (
                self._lifted(node) if self._flat or self._has_rows_and_heads(node) else with_rank(self._graph, node, 4)
            )
        node = with_rank(self._graph, node, self._rank)
        if self._swapped:
            node = self._swap(node)
        return self._joined(self._expanded(node) if any(size != 1 for size in _head_dims(node)) else node)

    def result(self, node: fx.Node, like: fx.Node) -> fx.Node:
        """Return an attention's output `[rows, heads, tokens, width]` in the shape that the model has."""
        shape = list(like.meta["val"].shape)
        if len(shape) == 4:
            return node
        if not self._swapped:
            return self._reshaped(node, shape)
        shape[1], shape[2] = shape[2], shape[1]
        return self._swap(self._reshaped(node, shape))

    def _lifted(self, node: fx.Node) -> fx.Node:
        """Return a value without dims of heads, or with one that holds the rows too, as `[rows, heads, ...]`."""
        value = node.meta["val"]
        if value.ndim != 3:
            return node
        if self._has_rows_and_heads(node):
            return self._reshaped(node, [*self._batch, *value.shape[1:]])
        return emit(self._graph, node, aten.unsqueeze.default, node, 1)

    def _has_rows_and_heads(self, node: fx.Node) -> bool:
        if self._batch is None:
            return False
        rows, heads = map(expression, self._batch)
        return bool(expression(node.meta["val"].shape[0]) == rows * heads)

    def _swap(self, node: fx.Node) -> fx.Node:
        return emit(self._graph, node, aten.transpose.int, node, 1, 2)

    def _expanded(self, node: fx.Node) -> fx.Node:
        """Return a value with all heads in every one of its dims of heads."""
        if _head_dims(node) == self._common:
            return node
        return emit(self._graph, node, aten.expand.default, node, [-1, *self._common, -1, -1])

    def _repeated(self, node: fx.Node) -> fx.Node:
        """Return keys or values with heads whose order says which queries they are for: consecutive ones share them."""
        first, *second = _head_dims(node)
        consecutive = not second or first == self._common[0] or first == second[0] == 1
        return node if consecutive else self._expanded(node)

    def _joined(self, node: fx.Node) -> fx.Node:
        """Return a value with one dim of heads."""
        value = node.meta["val"]
        if value.ndim == 4:
            return node
        return self._reshaped(node, [value.shape[0], value.shape[1] * value.shape[2], *value.shape[3:]])

    def _reshaped(self, node: fx.Node, shape: Sequence[Any]) -> fx.Node:
        new = self._graph.call_function(aten.reshape.default, (node, [_size_argument(self._graph, s) for s in shape]))
        new.meta = {**node.meta, "val": node.meta["val"].reshape(tuple(shape))}
        return new


def _head_dims(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape[1:-2])


def _size_argument(graph: fx.Graph, size: Any) -> Any:
    """Return a size as a graph argument; a symbolic one is looked up among the graph's size nodes."""
    if isinstance(size, int):
        return size
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and value.node.expr == size.node.expr:
            return node
    return -1

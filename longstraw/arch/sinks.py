"""Recognises an attention sink that is written as a rescaling of the attention's output.

A sink is one more logit s in the softmax's denominator, with a value of zero. With L = log sum exp(scores),

    sum(exp(scores) * v) / (exp(L) + exp(s)) = (softmax(scores) @ v) * sigmoid(L - s)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import fx

from longstraw.arch.rules import arguments, emit, packet, tensors
from longstraw.arch.spellings import CASTS, SAME_ORDER, before, sizes_of

aten = torch.ops.aten
_SAME_ORDER = (*CASTS, *SAME_ORDER)
"""Ops that keep the order of a value's elements: where sizes are the same again, so is what dims mean."""


class Rescaled(NamedTuple):
    """An attention's output after its rescaling.

    Attributes:
        node: the output.
        logit: the sink, broadcast against rows, heads and tokens (and a last dim of 1).
        heads: how many heads there are.
    """

    node: fx.Node
    logit: fx.Node
    heads: int

    def sink(self, graph: fx.Graph) -> fx.Node:
        """Return the sink as `[heads]`, inserted at the graph's insertion point."""
        count = self.logit.meta["val"].numel()
        sink = emit(graph, self.logit, aten.reshape.default, self.logit, [count])
        return sink if count == self.heads else emit(graph, sink, aten.expand.default, sink, [self.heads])


def of_heads(graph: fx.Graph, column: fx.Node, heads: int) -> fx.Node | None:
    """Return sinks that are joined to scores as `[heads]`, inserted at the graph's insertion point.

    Args:
        graph: the graph.
        column: the sinks as they are joined, `[rows, heads, tokens, 1]`, with the heads in one dim or two, or
            `[rows * heads, tokens, 1]`.
        heads: how many heads there are.

    Returns:
        None where sinks differ between rows or tokens, or are other than one for each head or for all.
    """
    repeats = (aten.expand, *CASTS)
    sink = before(column, repeats)
    if column.meta["val"].ndim == 3:  # rows and heads are one dim: before they became one
        sink = before(before(sink, SAME_ORDER), repeats)
    sizes = _sizes(sink)
    rank = max(4, column.meta["val"].ndim)
    sizes = [1] * (rank - len(sizes)) + sizes
    count = math.prod(sizes[1:-2])
    if len(sizes) != rank or any(size != 1 for size in (sizes[0], *sizes[-2:])) or count not in (1, heads):
        return None
    plain = before(sink, SAME_ORDER)
    if plain.meta["val"].ndim == 1 and count == heads:
        return plain
    flat = emit(graph, sink, aten.reshape.default, sink, [int(count)])
    return flat if count == heads else emit(graph, flat, aten.expand.default, flat, [heads])


def sums_of(scores: Iterable[fx.Node]) -> list[fx.Node]:
    """Return every log-sum-exp of any of these values, cast or not."""
    seen, stack = set(scores), list(scores)
    while stack:
        new = [user for user in stack.pop().users if user not in seen]
        seen.update(new)
        stack += [user for user in new if packet(user.target) in CASTS]
    return [node for node in seen if packet(node.target) is aten.logsumexp]


def rescaled(softmax: fx.Node, product: fx.Node) -> Rescaled | None:
    """Return how the output of an attention is rescaled by `sigmoid(logsumexp(scores) - sink)`; None if it is not.

    Args:
        softmax: of the scores `[rows, heads, tokens, tokens]`.
        product: of its weights and the values.
    """
    scores = before(arguments(softmax)["self"], CASTS)
    output = product
    while len(output.users) == 1 and packet(next(iter(output.users)).target) in CASTS:
        output = next(iter(output.users))
    if len(output.users) != 1 or scores.meta["val"].ndim != 4:
        return None
    node = next(iter(output.users))
    operands = tensors(node.args)
    if packet(node.target) is not aten.mul or len(operands) != 2 or operands[0] is operands[1]:
        return None
    factor = operands[1] if operands[0] is output else operands[0]
    whole = _sizes(scores)[:3]
    logit = _logit(factor, scores)
    if logit is None or _sizes(factor) != [*whole, 1] or _sizes(node) != _sizes(product) or _sizes(node)[:3] != whole:
        return None
    return Rescaled(node, logit, int(whole[1]))


def _logit(factor: fx.Node, scores: fx.Node) -> fx.Node | None:
    """Return the sink of a factor that is `sigmoid(logsumexp(scores) - sink)` and used for nothing else, or None."""
    sigmoid = _only_used_here(factor, _SAME_ORDER)
    if sigmoid is None or packet(sigmoid.target) is not aten.sigmoid:
        return None
    difference = _only_used_here(arguments(sigmoid)["self"], CASTS)
    if difference is None or packet(difference.target) is not aten.sub or len(tensors(difference.args)) != 2:
        return None
    a = arguments(difference)
    total = _only_used_here(a["self"], _SAME_ORDER)
    if total is None or packet(total.target) is not aten.logsumexp or a["alpha"] != 1:
        return None
    summed = arguments(total)
    if before(summed["self"], CASTS) is not scores or list(summed["dim"]) not in ([-1], [3]):
        return None
    whole, sizes, logit = _sizes(scores)[:3], _sizes(difference), a["other"]
    if sizes not in (whole, [*whole, 1]):
        return None
    given = [1] * (len(sizes) - logit.meta["val"].ndim) + _sizes(logit)
    same_for_all = given[0] == 1 and given[1] in (1, whole[1]) and all(size == 1 for size in given[2:])
    return logit if same_for_all else None


def _only_used_here(node: fx.Node, through: tuple[Any, ...]) -> fx.Node | None:
    """Return the value before ops of some kinds, if neither it nor one of their results has another use."""
    while len(node.users) == 1 and packet(node.target) in through:
        node = node.args[0]  # type: ignore[assignment]
    return node if len(node.users) == 1 else None


def _sizes(node: fx.Node) -> list[Any]:
    return sizes_of(node.meta["val"])

"""Recognises masks that multiply the scores: `scores * b + c * (1 - b)`, where b is 1 for keys that are seen, else 0.

That is `where(b, scores, c)`. What stands for c * (1 - b) is any arithmetic on b alone: its values at 0 and 1 say.
Where the graph does not show that b is 0 or 1, the run time looks at its values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx

from longstraw import compat
from longstraw.arch.constants import filled_with
from longstraw.arch.rules import arguments, emit, packet, tensors
from longstraw.arch.spellings import CASTS, NOT, VIEWS, before, sizes_of
from longstraw.blocks import HIDING

aten = torch.ops.aten
_ARITHMETIC = (aten.add, aten.sub, aten.rsub, aten.mul, aten.div, aten.neg, *CASTS, *NOT)
_VIEWS = (aten.slice, *VIEWS, *CASTS)
_UNPROVEN = "may_be_other_than_zero_or_one"
"""Under this name `factor != 0` says in its meta that the run time has to look at the factor's values."""


class Masked(NamedTuple):
    """Scores under a mask that multiplies them.

    Attributes:
        product: the scores times the factor.
        scores: the scores.
        factor: 1 where a key is seen, else 0.
    """

    product: fx.Node
    scores: fx.Node
    factor: fx.Node

    def seen(self, graph: fx.Graph) -> fx.Node:
        """Return the mask as bools, inserted at the graph's insertion point."""
        seen = emit(graph, self.product, aten.ne.Scalar, self.factor, 0)
        seen.meta[_UNPROVEN] = not _shows_zero_or_one(self.factor)
        return seen


def masked(node: fx.Node, *, is_mask: Callable[[fx.Node], bool], is_score: Callable[[fx.Node], bool]) -> Masked | None:
    """Return how a sum masks scores by a product; None where it does not.

    Args:
        node: any op on the scores.
        is_mask: whether a value differs between queries or keys.
        is_score: whether a value comes from a product of queries and keys.
    """
    if packet(node.target) not in (aten.add, aten.sub) or len(tensors(node.args)) != 2:
        return None
    a = arguments(node)
    if a["alpha"] != 1:
        return None
    sign = 1 if packet(node.target) is aten.add else -1
    for left, right in ((a["self"], a["other"]), (a["other"], a["self"]))[: 2 if sign == 1 else 1]:
        product = before(left, CASTS)
        operands = tensors(product.args)
        if packet(product.target) is not aten.mul or len(operands) != 2 or sum(map(is_score, operands)) != 1:
            continue
        scores, factor = sorted(operands, key=lambda x: not is_score(x))
        shapes = [sizes_of(x.meta["val"]) for x in (scores, product, node)]
        if not is_mask(factor) or shapes.count(shapes[0]) != 3:
            continue
        hidden, seen = (_value(right, factor, at) for at in (0, 1))
        if hidden is not None and seen == 0 and sign * hidden <= HIDING:
            return Masked(product, scores, factor)
    return None


def is_unproven(node: fx.Node) -> bool:
    """Return whether a node is a mask `factor != 0` whose factor's values must be looked at."""
    return packet(node.target) is aten.ne and bool(node.meta.get(_UNPROVEN))


def origin(seen: fx.Node, *, is_light: Callable[[fx.Node], bool]) -> fx.Node | None:
    """Return the light value that the factor of a mask is a part of; None where there is none."""
    source = arguments(seen)["self"]
    while not is_light(source):
        if source.op != "call_function" or packet(source.target) not in _VIEWS:
            return None
        source = source.args[0]
    return source


def _value(node: fx.Node, factor: fx.Node, at: int) -> float | None:
    """Return what arithmetic on a factor alone gives where the factor has a value; None for anything else."""
    base = before(factor, CASTS)

    def run(node: Any) -> Any:
        if not isinstance(node, fx.Node):
            return node
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            raise _OtherError
        if before(node, CASTS) is base:
            return torch.full((1,), at, dtype=value.dtype)
        if node.op == "get_attr" and value.ndim == 0 and (number := filled_with(node)) is not None:
            return torch.tensor(number, dtype=value.dtype)
        if packet(node.target) not in _ARITHMETIC:
            raise _OtherError
        args, kwargs = fx.node.map_aggregate((node.args, dict(node.kwargs)), run)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    try:
        with compat.outside_of_fakes():
            return float(run(node))
    except _OtherError:
        return None


class _OtherError(Exception):
    """A value is not arithmetic on the factor alone."""


def _shows_zero_or_one(node: fx.Node) -> bool:
    """Return whether the graph shows that a value is 0 or 1 everywhere."""
    while packet(node.target) in _VIEWS and node.meta["val"].dtype != torch.bool:
        node = node.args[0]  # type: ignore[assignment]
    if packet(node.target) in (aten.tril, aten.triu):
        return filled_with(node.args[0]) in (0, 1)
    return bool(node.meta["val"].dtype == torch.bool)

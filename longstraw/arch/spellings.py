"""Ops that change how a value is written, not its numbers: what patterns look through."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from longstraw.arch.rules import packet
from longstraw.compat import expression

aten = torch.ops.aten
CASTS = (aten.to, aten._to_copy, aten.clone, aten.contiguous, aten.alias, aten.type_as)
"""Copies, and the same numbers in another dtype."""
COPIES = (*CASTS, aten.detach)
"""The same, and the same numbers without their gradient."""
NOT = (aten.logical_not, aten.bitwise_not)
SAME_ORDER = (aten.view, aten.reshape, aten._unsafe_view, aten.unsqueeze, aten.squeeze)
"""The same numbers in the same order, with other dims."""
VIEWS = (*SAME_ORDER, aten.expand)
"""The same numbers, some of them repeated."""


def before(node: fx.Node, ops: Collection[Any]) -> fx.Node:
    """Return the value before a run of ops of some kinds."""
    while packet(node.target) in ops:
        node = node.args[0]  # type: ignore[assignment]
    return node


def sizes_of(value: Any) -> list[Any]:
    """Return the sizes of a (fake) tensor as numbers and expressions that can be compared without a guard."""
    return [expression(size) for size in value.shape]


def same_sizes(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return whether two shapes are the same, without a guard."""
    return list(map(expression, one)) == list(map(expression, other))

"""Takes off an attention's masks the part that says which keys were selected.

Models scatter the indices of a selection into a mask, true or zero where a key was selected, and combine it with the
others by "and", by a sum, or by filling. What is left are masks of positions, and the selection itself.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from longstraw import ops
from longstraw.arch.constants import filled_with
from longstraw.arch.rules import arguments, emit, packet, tensors
from longstraw.arch.selection import is_sum, is_unseen, with_rank
from longstraw.arch.spellings import CASTS, NOT, VIEWS, before, sizes_of
from longstraw.blocks import UNSEEN
from longstraw.compat import expression

aten = torch.ops.aten
_AND = (aten.logical_and, aten.bitwise_and)
_VIEWS = (*VIEWS, *CASTS)

_Everything = object()
"""Stands for a selection of all keys."""


def split(graph: fx.Graph, masks: tuple[fx.Node, ...]) -> tuple[tuple[fx.Node, ...], fx.Node | None, bool]:
    """Return an attention's masks without the part that says which keys were selected, and the indices selected.

    The last one says whether keys that were not selected keep a finite score: a query that sees none of those selected
    would attend to all.

    Args:
        graph: where new nodes are inserted, at its insertion point.
        masks: masks of one attention, all of which must let a key be seen.
    """
    kept: list[fx.Node] = []
    found: list[Any] = []
    for mask in masks:
        rest = _take_off(graph, mask, found)
        kept += [rest] if rest is not None else []
    chosen = list(dict.fromkeys(x for x in found if x is not _Everything))
    if len(chosen) > 1:
        return masks, None, False
    finite = any(mask.meta["val"].is_floating_point() for mask in masks)
    return tuple(kept), chosen[0] if chosen else None, finite


def _take_off(graph: fx.Graph, mask: fx.Node, found: list[Any]) -> fx.Node | None:
    """Return a mask without its selections, which are added to `found`; None when nothing else is in it."""
    name = packet(mask.target)
    selected = _selected(mask, seen=True)
    if selected is not None:
        found.append(selected)
        return None
    if name in _VIEWS and len(tensors(mask.args)) == 1:
        known = len(found)
        rest = _take_off(graph, mask.args[0], found)  # type: ignore[arg-type]
        if len(found) == known or rest is None:
            return mask if len(found) == known else None
        inside = mask.args[0].meta["val"]  # type: ignore[union-attr]
        rest = with_rank(graph, rest, inside.ndim)
        if name in (aten.view, aten.reshape, aten.squeeze) and sizes_of(rest.meta["val"]) != sizes_of(inside):
            del found[known:]  # what is left has other sizes than the view was told
            return mask
        return emit(graph, mask, mask.target, rest, *mask.args[1:])
    if name is aten.masked_fill and is_unseen(arguments(mask)["value"]):
        base, condition = mask.args[:2]
        selected = _selected(condition, seen=False)
        if selected is not None:
            found.append(selected)
            return _take_off(graph, base, found)  # type: ignore[arg-type]
    if (name in _AND and len(tensors(mask.args)) == 2) or is_sum(mask):
        known = len(found)
        parts = [_take_off(graph, x, found) for x in tensors(mask.args)]
        if len(found) == known:
            return mask
        left = [part for part in parts if part is not None]
        if len(left) < 2:
            return left[0] if left else None
        return emit(graph, mask, mask.target, *left)
    return mask


def _selected(node: Any, *, seen: bool) -> Any:
    """Return the indices that a mask is true at (or, if not `seen`, false at); `_Everything`, or None for others."""
    while isinstance(node, fx.Node) and packet(node.target) in (*_VIEWS, *NOT):
        seen = seen != (packet(node.target) in NOT)
        node = node.args[0]
    if not isinstance(node, fx.Node) or packet(node.target) is not aten.scatter:
        return None
    a = arguments(node)
    base, value = filled_with(a["self"]), a.get("value")
    rank = node.meta["val"].ndim
    if value is None or base is None or a["dim"] % rank != rank - 1:
        return None
    if node.meta["val"].dtype == torch.bool:
        says = bool(value) == seen and bool(base) != seen
    else:
        says = value == 0 and base <= UNSEEN if seen else value <= UNSEEN and base == 0
    index: Any = before(a["index"], CASTS)
    if not says:
        return None
    if index.target is ops.select:
        return index
    if index.target is operator.getitem and packet(index.args[0].target) is aten.topk:
        topk = arguments(index.args[0])
        count = topk["k"].meta["val"] if isinstance(topk["k"], fx.Node) else topk["k"]
        if index.args[1] == 1 and expression(count) == expression(topk["self"].meta["val"].shape[-1]):
            return _Everything
    return None

"""What a span knows only of itself: the places of its entries in an order, and how many of them are alike.

Numbers of both kinds differ from those of the whole step, in which other tokens stand between. They are marked, and an
op that reads marked numbers is refused unless its result is the same either way: places as an index, counts as the ends
of the groups of a grouped product.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from longstraw.arch.constants import filled_with, is_new
from longstraw.arch.rules import Reader, arguments, packet, tensors
from longstraw.arch.spellings import COPIES, SAME_ORDER
from longstraw.layout import Counts, Dim

aten = torch.ops.aten
_FLAT = (*SAME_ORDER, aten.flatten)
_INTEGERS = (torch.int32, torch.int64)
_EXACT = (*_INTEGERS, torch.float32, torch.float64)


@dataclass(frozen=True)
class Places:
    """Marks numbers that say where entries stand.

    Attributes:
        order: the order that values indexed by them are in.
        of: what is put in that order.
        undoes: the order that indexing by them undoes.
        divisor: what the numbers of entries were divided by, to be numbers of tokens.
    """

    order: str
    of: Dim
    undoes: str | None = None
    divisor: int = 1


@dataclass(frozen=True)
class Counted:
    """Marks numbers that say how many entries have each value.

    Attributes:
        values: what was counted, as it was before sorts and casts.
        summed: whether they are running sums of the counts.
    """

    values: fx.Node
    summed: bool = False


@dataclass(frozen=True)
class Order:
    """What puts entries in an order.

    Attributes:
        values: what was sorted, as it was before casts.
        of: what the values run over.
        ascending: whether the lowest comes first.
    """

    values: fx.Node
    of: Dim
    ascending: bool


def times(r: Reader, dim: Dim, of: Dim) -> int | None:
    """Return how many entries `of` has for each of `dim`, side by side; None when it isn't made of those."""
    rest = of[len(dim) :]
    same = of[: len(dim)] == dim and all(isinstance(factor, tuple) for factor in rest)
    return r.sizes.of_dim(rest)[0] if same else None


def check_use(r: Reader, node: fx.Node) -> None:
    """Refuse an op that reads places or counts for what a span's are no good for."""
    for x in node.all_input_nodes:
        mark = r.marks.get(x)
        if isinstance(mark, Places) and not _good_places(r, node, x, mark):
            r.mixes_tokens(node, _PLACES_MISUSED[0], remedy=_PLACES_MISUSED[1])
        if isinstance(mark, Counted) and not _good_counts(r, node, x, mark):
            r.mixes_tokens(node, _COUNTS_MISUSED[0], remedy=_COUNTS_MISUSED[1])


_PLACES_MISUSED = (
    "it computes with the numbers of an order (argsort, sort) of all rows and tokens, and a span has an order of its "
    "own",
    "Index by them, undo them by argsort, or divide them by the number of entries of a token with `//`; nothing else "
    "of them is known for a span.",
)
"""What is wrong, and the remedy."""
_COUNTS_MISUSED = (
    "it computes with the number of entries of all rows and tokens that are alike (tokens per expert), and a span has "
    "numbers of its own",
    "They may become the offsets of a grouped product, by cumsum. Loads of experts, and limits to what one takes, "
    "depend on every row: leave them out in training.",
)


def _good_places(r: Reader, node: fx.Node, x: fx.Node, mark: Places) -> bool:
    name = packet(node.target)
    if node.target is operator.getitem:
        return bool(node.args[1] == 1) or not isinstance(r.marks.get(arguments(x)["self"]), Places)
    if name in COPIES:
        return node.meta["val"].dtype in _INTEGERS
    if name in _FLAT:
        return node.meta["val"].ndim == 1
    if name is aten.index:
        return x not in tensors(node.args[0])
    if name is aten.index_put:
        return x not in tensors(node.args[2])
    if is_new(node):
        return True
    if mark.divisor != 1:
        return False
    if name in (aten.argsort, aten.sort):
        return True
    by = node.args[1] if len(node.args) > 1 and node.args[0] is x else None
    if not isinstance(by, int) or by < 1:
        return False
    if name is aten.remainder:  # which of a token's entries it is
        return mark.undoes is None and _entries_side_by_side(r, mark.of) % by == 0
    floors = name is aten.div and node.kwargs.get("rounding_mode") in ("floor", "trunc")
    return name is aten.floor_divide or floors


def _entries_side_by_side(r: Reader, of: Dim) -> int:
    plain = [i for i, factor in enumerate(of) if not isinstance(factor, tuple)]
    return r.sizes.of_dim(of[plain[-1] + 1 :])[0] if plain else 1


def _good_counts(r: Reader, node: fx.Node, x: fx.Node, mark: Counted) -> bool:
    name = packet(node.target)
    if name in COPIES:
        return node.meta["val"].dtype in _EXACT
    if is_new(node):
        return True
    if name is aten.cumsum:
        return not mark.summed
    if not mark.summed:
        return False
    if name in (aten.slice, aten.narrow):
        return True
    if name in (aten.pad, aten.constant_pad_nd):
        a = arguments(node)
        return not a["value"] and a.get("mode", "constant") == "constant"
    if name is aten.cat:
        return all(r.marks.get(part) == mark or filled_with(part) == 0 for part in arguments(node)["tensors"])
    return list(arguments(node).values())[2:3] == [x]  # the rule of a grouped product judges the rest


def marked(r: Reader, node: fx.Node, layout: Any) -> Any:
    """Mark an op's result where that is places or counts still, and return its layout."""
    name = packet(node.target)
    source = next((x for x in node.all_input_nodes if x in r.marks), None)
    mark = r.marks.get(source) if source is not None else None
    if mark is None or node in r.marks or is_new(node):
        return layout
    if isinstance(mark, Places):
        if name in (*COPIES, *_FLAT) or (node.target is operator.getitem and node.args[1] == 1):
            r.marks[node] = mark
        elif name in (aten.floor_divide, aten.div):
            r.marks[node] = replace(mark, divisor=node.args[1])  # type: ignore[arg-type]
    elif name in (*COPIES, aten.cumsum, aten.slice, aten.narrow, aten.pad, aten.constant_pad_nd, aten.cat):
        r.marks[node] = replace(mark, summed=mark.summed or name is aten.cumsum)
        return ((Counts(mark.values.name, r.shape(node)[0]),),)
    return layout

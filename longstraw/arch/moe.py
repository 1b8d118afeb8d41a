"""Dispatch of tokens to experts and back: sorts, histograms, grouped products, and the inverse order.

Expert layers put the entries of all tokens (k for each, one per chosen expert) in the order of their experts, run one
matrix per run of entries, and undo the order. Entries stay independent throughout, so the whole is token-wise: a dim in
such an order is `Shuffled(order, of)`, and indexing by the inverse order gives back what it was.

The order itself and the number of entries per expert are another matter: a span has its own, which are not the whole
step's. `arch/places.py` refuses every use of them but those that are exact with a span's.
"""

from __future__ import annotations

import operator
from typing import Any, NoReturn

import torch
from torch import fx

from longstraw.arch.places import Counted, Order, Places, times
from longstraw.arch.rules import LayoutRule, Reader, arguments, packet
from longstraw.arch.spellings import COPIES, SAME_ORDER
from longstraw.layout import Counts, Dim, Layout, Probe, Rows, Shuffled, Tokens, has

aten = torch.ops.aten
_KEEP_NUMBERS_APART = (torch.int16, torch.int32, torch.int64, torch.float32, torch.float64)
_REARRANGE = (*SAME_ORDER, aten.flatten, aten.transpose, aten.permute, aten.t)


def dispatched(r: Reader, node: fx.Node, dim: Dim, index: fx.Node) -> Dim:
    """Return what `x[index]` runs over when x's first dim runs over tokens."""
    places = r.marks.get(index)
    if isinstance(places, Places):
        return _placed(r, node, dim, places)
    copies = _counted_copies(r, index, r.sizes.of_dim(dim))
    if copies is None:
        r.mixes_tokens(node, "it picks tokens by an index that depends on data")
    return dim if copies == (1, 1) else (*dim, copies)


def _placed(r: Reader, node: fx.Node, dim: Dim, places: Places) -> Dim:
    first = dim[0]
    if len(dim) == 1 and isinstance(first, Shuffled) and first.order == places.undoes and places.divisor == 1:
        return first.of
    if times(r, dim, places.of) != places.divisor:
        r.mixes_tokens(
            node,
            "it picks tokens by the places of other entries than it has, or in an order that is not undone (numbers of "
            "entries become those of tokens by floor division only, where a token's entries stand side by side)",
        )
    return (Shuffled(places.order, places.of),)


def light_dispatched(r: Reader, node: fx.Node, source: fx.Node, index: fx.Node) -> Layout | None:
    """Return the layout of `x[order]` where x is computed before the segment runs; None for other indices."""
    places = r.marks.get(index)
    if not isinstance(places, Places):
        return None
    counted = _counted_copies(r, source, None)
    if counted is not None and r.sizes.is_static(counted) and places.divisor == 1:
        r.marks[node] = Places(places.order, places.of, divisor=counted[0])
        return ((Shuffled(places.order, places.of),),)
    layout = r.operand(node, source)
    return (_placed(r, node, layout[0], places), *layout[1:])


def inverse_written(r: Reader, node: fx.Node) -> Layout:
    """`inverse[order] = arange(n)`: the inverse of an order."""
    a = arguments(node)
    places = r.marks.get(a["indices"][0]) if len(a["indices"]) == 1 else None
    if (
        not isinstance(places, Places)
        or places.divisor != 1
        or a["self"] not in r.layouts
        or a["accumulate"]
        or r.shape(node) != (size := r.shape(a["indices"][0]))
        or _counted_copies(r, a["values"], size[0]) != (1, 1)
    ):
        r.unsupported(node, "it writes to places that depend on data")
    of: Dim = r.layouts[a["indices"][0]][0]
    r.marks[node] = Places(node.name, of, undoes=places.order)
    return ((Shuffled(node.name, of),),)


def _counted_copies(r: Reader, index: fx.Node, size: Probe | None) -> Probe | None:
    """Return k when an index counts 0, 0, .., 1, 1, .. (k times each) up to `size` (to any, if None), else None.

    The chain from `arange` is marked local: it counts the entries of the span, not tokens of the row.
    """
    chain = [index]
    while packet(chain[-1].target) in (aten.unsqueeze, aten.expand, aten.reshape, aten.view, aten.flatten, aten.to):
        chain.append(chain[-1].args[0])  # type: ignore[arg-type]
    last = chain[-1]
    interleaved = packet(last.target) is aten.repeat_interleave
    if interleaved:
        chain.append(last.args[0])  # type: ignore[arg-type]
        last = chain[-1]
    if packet(last.target) is not aten.arange or (size is not None and r.shape(last) != (size,)):
        return None
    (size,) = r.shape(last)
    total = r.shape(index)
    if len(total) != 1 or total[0][0] % size[0]:
        return None
    copies = (total[0][0] // size[0], total[0][1] // size[1])
    if copies[0] != copies[1]:
        return None
    # arange -> unsqueeze(1) -> expand(-1, k) -> reshape(-1): major dim counts, minor dim repeats.
    shapes = [r.shape(n) for n in chain]
    if not interleaved and copies != (1, 1) and not any(s == (size, copies) for s in shapes):
        return None
    r.local.update(chain)
    return copies


def ordered_tokens(r: Reader, node: fx.Node, source: Layout) -> Any:
    """`argsort`, `sort` of all tokens' entries, in one dim."""
    a = arguments(node)
    if len(source) != 1:
        r.keep(node, source[a["dim"] % len(source)], "it orders along that dim")
    before = r.marks.get(a["self"])
    undoes = before.order if isinstance(before, Places) and before.divisor == 1 and not a["descending"] else None
    r.marks[node] = Places(node.name, source[0], undoes)
    r.orders[node.name] = Order(_counted_values(a["self"]), source[0], not a["descending"])
    ordered: Layout = ((Shuffled(node.name, source[0]),),)
    return ordered if packet(node.target) is aten.argsort else (ordered, ordered)


def _counted_values(node: fx.Node) -> fx.Node:
    """Return the values that these are, in another order, shape, or dtype."""
    while True:
        name = packet(node.target)
        if name in (*COPIES, *_REARRANGE) and node.meta["val"].dtype in _KEEP_NUMBERS_APART:
            node = node.args[0]  # type: ignore[assignment]
        elif _is_result(node, 0, aten.sort):
            node = arguments(node.args[0])["self"]  # type: ignore[arg-type]
        else:
            return node


def _is_result(node: fx.Node, index: int, *names: Any) -> bool:
    """Return whether a node is a certain result of an op that has several."""
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and bool(node.args[1] == index) and packet(source.target) in names


def histogram(r: Reader, node: fx.Node) -> Layout:
    """How many entries of all tokens have each value: kept beside values in their order."""
    a = arguments(node)
    source = r.operand(node, a["self"])
    bins = r.shape(node)[0]
    if not any(has(dim, Tokens) or has(dim, Rows) for dim in source):
        return ((bins,),)
    values = _before_order(r, a["self"])
    low, high = a.get("min", 0), a.get("max", 1)
    if not _is_number(low) or not _is_number(high) or not low < high:
        r.mixes_tokens(node, "without min and max its bins lie between the least and the greatest value of all tokens")
    if low > 0 or not _is_index(values):
        r.mixes_tokens(node, "values below its min are not counted, and whether there are any depends on other tokens")
    r.marks[node] = Counted(values)
    return ((Counts(values.name, bins),),)


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def _before_order(r: Reader, node: fx.Node) -> fx.Node:
    """Return the values that were counted, as they were before they were put in an order."""
    node = _counted_values(node)
    while packet(node.target) is aten.index:
        a = arguments(node)
        places = r.marks.get(a["indices"][0]) if len(a["indices"]) == 1 else None
        if not isinstance(places, Places) or places.divisor != 1:
            break
        node = _counted_values(a["self"])
    return node


def _is_index(node: fx.Node) -> bool:
    """Return whether numbers are indices of something, such as an expert: none is below zero."""
    return packet(node.target) in (aten.argmax, aten.argmin) or _is_result(
        node, 1, aten.topk, aten.sort, aten.max, aten.min
    )


def grouped_mm(r: Reader, node: fx.Node) -> Layout:
    """One matrix per group of consecutive entries, which are in the order of what was counted."""
    entries, weight, offsets, *others = arguments(node).values()
    source, matrices = r.operand(node, entries), r.operand(node, weight)
    for dim in (source[-1], *matrices):
        r.keep(node, dim, "it sums over that dim")
    ends = r.marks.get(offsets)
    if not isinstance(ends, Counted) or not ends.summed or any(isinstance(x, fx.Node) for x in others):
        _not_the_groups(r, node)
    first = source[0][0] if len(source) == 2 and len(matrices) == 3 and len(source[0]) == 1 else None
    order = r.orders.get(first.order) if isinstance(first, Shuffled) else None
    if order != Order(ends.values, getattr(first, "of", ()), ascending=True):
        _not_the_groups(r, node)
    return (*source[:-1], matrices[-1])


def _not_the_groups(r: Reader, node: fx.Node) -> NoReturn:
    r.mixes_tokens(
        node,
        "the groups it takes are not those of entries sorted by the very numbers that were counted, from the lowest on",
    )


LIBRARY_RULES: dict[Any, LayoutRule] = {"transformers::grouped_mm_fallback": grouped_mm}
"""Rules of ops that libraries define, by their full name."""

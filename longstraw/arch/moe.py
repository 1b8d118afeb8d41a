"""Dispatch of tokens to experts and back: sorts, histograms, grouped products, and the inverse order.

Expert layers put the entries of all tokens (k for each, one per chosen expert) in the order of their experts, run one
matrix per run of entries, and undo the order. Entries stay independent throughout, so the whole is token-wise: a dim in
such an order is `Shuffled(order, of)`, and indexing by the inverse order gives back what it was.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from longstraw.arch.rules import LayoutRule, Reader, arguments, packet, tensors
from longstraw.layout import Counts, Dim, Layout, Probe, Shuffled, has

aten = torch.ops.aten


def dispatched(r: Reader, node: fx.Node, dim: Dim, index: fx.Node) -> Dim:
    """Return what `x[index]` runs over when x's first dim runs over tokens."""
    order = _order(r, index)
    if isinstance(order, str):  # an argsort of values in this very order, or of an order
        inner = _inverse_of(index)
        if len(dim) == 1 and isinstance(dim[0], Shuffled) and inner is not None and dim[0].order == inner:
            return dim[0].of
        if not has(dim, Shuffled):
            return (Shuffled(order, dim),)
        r.unsupported(node, "it puts tokens in an order that is not undone")
    copies = _counted_copies(r, index, r.sizes.of_dim(dim))
    if copies is not None:
        return dim if copies == (1, 1) else (*dim, copies)
    placed = r.layouts.get(index)
    if placed is not None and _same_order_copies(r, node, index, dim):
        return placed[0]
    r.mixes_tokens(node, "it picks tokens by an index that depends on data")


def _order(r: Reader, index: fx.Node) -> str | None:
    """Return the name of the sort that an index comes from, or None."""
    origin = _skip_copies(index)
    sorts = packet(origin.target) is aten.argsort or _is_sort_index(origin)
    return origin.name if sorts or _written_order(origin) is not None else None


def _inverse_of(index: fx.Node) -> str | None:
    """Return the name of the sort that this index undoes (`argsort(argsort(x))`), or None."""
    origin = _skip_copies(index)
    written = _written_order(origin)
    if written is not None:
        return _order_name(written)
    if packet(origin.target) is aten.argsort:
        inner = _skip_copies(origin.args[0])  # type: ignore[arg-type]
        if packet(inner.target) is aten.argsort or _is_sort_index(inner):
            return inner.name
    return None


def _order_name(index: fx.Node) -> str:
    return _skip_copies(index).name


def _written_order(node: fx.Node) -> fx.Node | None:
    """Return `order` when a node is `inverse[order] = arange(n)`, else None."""
    if packet(node.target) is not aten.index_put:
        return None
    a = arguments(node)
    values = a["values"]
    counts = isinstance(values, fx.Node) and packet(values.target) is aten.arange and not a["accumulate"]
    return a["indices"][0] if counts and len(a["indices"]) == 1 else None


def inverse_written(r: Reader, node: fx.Node) -> Layout:
    """`inverse[order] = arange(n)`: the inverse of an order."""
    order, source = _written_order(node), r.layouts.get(arguments(node)["self"])
    if order is None or source is None or order not in r.layouts or _order(r, order) is None:
        r.unsupported(node, "it writes to places that depend on data")
    placed: Layout = r.layouts[order]
    if len(placed) != 1 or _counted_copies(r, arguments(node)["values"], r.sizes.of_dim(placed[0])) != (1, 1):
        r.unsupported(node, "it writes to places that depend on data")
    return placed


def _is_sort_index(node: fx.Node) -> bool:
    return (
        node.op == "call_function"
        and getattr(node.target, "__name__", "") == "getitem"
        and bool(node.args[1] == 1)
        and packet(node.args[0].target) is aten.sort  # type: ignore[union-attr]
    )


def _skip_copies(node: fx.Node) -> fx.Node:
    while packet(node.target) in (aten.to, aten._to_copy, aten.clone, aten.contiguous, aten.alias, aten.detach):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _counted_copies(r: Reader, index: fx.Node, size: Probe) -> Probe | None:
    """Return k when an index counts 0, 0, .., 1, 1, .. (k times each) up to `size`, else None.

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
    if packet(last.target) is not aten.arange or r.shape(last) != (size,):
        return None
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


def _same_order_copies(r: Reader, node: fx.Node, index: fx.Node, dim: Dim) -> bool:
    """Return whether `index` is `counting[order]`: each shuffled entry picks its own token."""
    origin = _skip_copies(index)
    if packet(origin.target) is aten.index:
        a = arguments(origin)
        return _counted_copies(r, a["self"], r.sizes.of_dim(dim)) is not None and _order(r, a["indices"][0]) is not None
    if packet(origin.target) in (aten.floor_divide, aten.div):
        inner, divisor = origin.args[:2]
        total, size = r.shape(index)[0], r.sizes.of_dim(dim)
        copies = {total[0] // size[0], total[1] // size[1]}  # of each token, one beside the other
        return isinstance(inner, fx.Node) and _order(r, inner) is not None and copies == {divisor}
    return False


def ordered_tokens(r: Reader, node: fx.Node, source: Layout) -> Any:
    """`argsort`, `sort` of all tokens' entries, in one dim."""
    if len(source) != 1:
        r.keep(node, source[arguments(node)["dim"] % len(source)], "it orders along that dim")
    if len(source[0]) == 1 and isinstance(source[0][0], Shuffled):
        return source  # argsort of an order: its inverse
    shuffled: Layout = ((Shuffled(node.name, source[0]),),)
    if packet(node.target) is aten.argsort:
        return shuffled
    return ((Shuffled(_index_name(node), source[0]),),), ((Shuffled(_index_name(node), source[0]),),)


def _index_name(node: fx.Node) -> str:
    return next((u.name for u in node.users if u.args[1:] == (1,)), node.name)


def histogram(r: Reader, node: fx.Node) -> Layout:
    """How many of the shuffled entries fall into each bin: kept beside values in that order."""
    source = r.operand(node, tensors(node.args)[0])
    order = "" if not source or not source[0] else getattr(source[0][0], "order", "")
    return ((Counts(order, r.shape(node)[0]),),)


def grouped_mm(r: Reader, node: fx.Node) -> Layout:
    """One matrix per group of consecutive shuffled entries."""
    left = tensors(node.args)[0]
    source = r.operand(node, left)
    for operand in tensors((node.args[2:], node.kwargs)):
        r.operand(node, operand)
    return (*source[:-1], (r.shape(node)[-1],))


LIBRARY_RULES: dict[Any, LayoutRule] = {"transformers::grouped_mm_fallback": grouped_mm}
"""Rules of ops that libraries define, by their full name."""

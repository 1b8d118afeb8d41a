"""Layout rules of ops that read or write entries by index: tables, gathers, scatters, dispatch of tokens to experts."""

from __future__ import annotations

import torch
from torch import fx

from longstraw.arch import moe
from longstraw.arch.rules import IN_TILES, Reader, arguments, packet, tensors
from longstraw.layout import Layout, Rows, Tokens, has, over_pairs

aten = torch.ops.aten
_TO_ONE_PLACE = "writes what several tokens say to one place"
_BY_MASK = "Say which tokens with a mask, as in torch.where(chosen[..., None], value, x)."


def embedding(r: Reader, node: fx.Node) -> Layout:
    """Rows of a table."""
    a = arguments(node)
    if a["weight"] in r.layouts and any(has(dim, Tokens) or has(dim, Rows) for dim in r.layouts[a["weight"]]):
        r.unsupported(node, "its table depends on tokens")
    if a["scale_grad_by_freq"] and not r.is_light(a["weight"]):
        r.unsupported(
            node,
            "with scale_grad_by_freq the table's gradient is divided by how often a token stands in the whole batch",
            remedy="Leave scale_grad_by_freq out, or freeze the table.",
        )
    return (*r.operand(node, a["indices"]), (r.shape(node)[-1],))


def gathered(r: Reader, node: fx.Node) -> Layout:
    """Entries along a plain dim, chosen for every token (of hidden values, or of a table)."""
    a = arguments(node)
    d = a["dim"] % len(r.shape(node))
    table, index = a["self"], a["index"]
    like = next((r.layouts[x] for x in (table, index) if x in r.layouts), None)
    read = [
        r.operand(node, x) if x in r.layouts or like is None else r.align(node, x, _other_at(r, node, x, like, d))
        for x in (table, index)
    ]
    r.keep(node, read[0][d], "it picks entries along that dim")
    others = r.merge(node, [_without(layout, d) for layout in read])
    return (*others[:d], read[1][d], *others[d + 1 :])


def taken_along(r: Reader, node: fx.Node) -> Layout:
    """`take_along_dim`, which PyTorch traces for constant sizes only: it compares them as Python numbers."""
    r.unsupported(
        node,
        "PyTorch traces it for one number of rows and tokens only",
        remedy="Write x.gather(dim, indices), which picks the same entries where the other sizes are equal.",
    )


def scattered(r: Reader, node: fx.Node) -> Layout:
    """Entries written along a plain dim, for every token."""
    a = arguments(node)
    if packet(node.target) in (aten.index_add, aten.index_copy, aten.index_fill):
        adds = packet(node.target) is aten.index_add
        for dim in _listed(r, node, a["index"]):
            r.keep(node, dim, f"it {'adds up what several tokens write' if adds else _TO_ONE_PLACE}")
    like = next((r.layouts[x] for x in tensors(node.args) if x in r.layouts), None)
    out = r.layouts.get(a["self"])
    if out is None:
        out = (
            r.operand(node, a["self"])
            if like is None
            else r.align(node, a["self"], _other_at(r, node, a["self"], like, a["dim"]))
        )
    d = a["dim"] % len(out)
    r.keep(node, out[d], "it writes along that dim")
    for name in ("index", "src", "source"):
        other = a.get(name)
        if isinstance(other, fx.Node) and len(r.shape(other)) == len(out):
            layout = r.layouts.get(other) or r.align(node, other, _other_at(r, node, other, out, d))
            r.keep(node, layout[d], f"it {_TO_ONE_PLACE}")
            r.merge(node, [_without(out, d), _without(layout, d)])
    return out


def _listed(r: Reader, node: fx.Node, index: fx.Node) -> Layout:
    """Return the layout of an index; one of any other size than rows' and tokens' is a list, the same for all."""
    shape = r.shape(index)
    if not r.is_light(index) or r.sizes.locate_shape(shape) is not None or r.sizes.has_window(shape):
        return r.operand(node, index)
    layout = tuple((size,) for size in shape)
    r.read(node, index, layout)
    return layout


def _without(layout: Layout, d: int) -> Layout:
    return (*layout[:d], (), *layout[d + 1 :])


def _other_at(r: Reader, user: fx.Node, node: fx.Node, like: Layout, d: int) -> Layout:
    """Return `like` with dim `d` as in `node`, judged by its size there."""
    d %= len(like)
    dim = r.sizes.locate(r.shape(node)[d], first=d == 0)
    if dim is None:
        r.refuse_unless_equal(user, node, d)
        r.unsupported(user, f"its operand {node.name} has a size that is neither rows nor tokens of the step")
    return (*like[:d], dim, *like[d + 1 :])


def slice_scattered(r: Reader, node: fx.Node) -> Layout:
    """A range of a plain dim replaced."""
    a = arguments(node)
    out = r.operand(node, a["self"])
    d = a["dim"] % len(out)
    r.keep(node, out[d], "it writes a part of that dim", remedy=IN_TILES)
    source = a["src"]
    whole = len(r.shape(source)) == len(out)
    read = r.layouts.get(source)
    if read is None:
        read = r.align(node, source, _other_at(r, node, source, out, d) if whole else (*out[:d], *out[d + 1 :]))
    r.merge(node, [_without(out, d), _without(read if whole else (*read[:d], (), *read[d:]), d)])
    return out


def indexed(r: Reader, node: fx.Node) -> Layout:
    """Advanced indexing: tables read by tokens, and dispatch of tokens to experts and back."""
    a = arguments(node)
    source_node, indices = a["self"], list(a["indices"])
    if len(indices) == 1 and r.is_light(source_node):
        found = moe.light_dispatched(r, node, source_node, indices[0])
        if found is not None:
            return found
    source = r.operand(node, source_node) if source_node in r.layouts or not r.is_light(source_node) else None
    places = [i for i, index in enumerate(indices) if index is not None]
    if source is None:
        source = tuple((size,) for size in r.shape(source_node))
        if not all(r.sizes.is_static(size) for size in r.shape(source_node)):
            r.unsupported(node, "it indexes a value of the rows by hidden values")
    mixing = [i for i in places if has(source[i], Tokens) or has(source[i], Rows)]
    if not mixing:
        if any(index in r.marks for index in indices):
            r.mixes_tokens(node, "it reads a table by the places of entries in an order, and a span has its own")
        read = _listed if source_node in r.layouts else Reader.operand
        out = _picked(r, node, source, places, r.merge(node, [read(r, node, indices[i]) for i in places]))
        if over_pairs(out, Tokens):
            r.mixes_tokens(node, "it reads of every token what an index says of every other")
        if over_pairs(out, Rows):
            r.mixes_rows(node, "it reads of every row what an index says of every other")
        return out
    if places == [0] and mixing == [0]:
        return (moe.dispatched(r, node, source[0], indices[0]), *source[1:])
    r.unsupported(node, "it picks tokens or rows by index")


def index_written(r: Reader, node: fx.Node) -> Layout:
    """`x[..., i] = values`: the same entries written for every token; or the inverse of an order."""
    a = arguments(node)
    places = [i for i, index in enumerate(a["indices"]) if index is not None]
    out = r.layouts.get(a["self"])
    if out is None or not all(r.is_light(a["indices"][i]) for i in places):
        return moe.inverse_written(r, node)
    picked = r.merge(node, [_listed(r, node, a["indices"][i]) for i in places])
    for dim in (*(out[i] for i in places), *picked):
        r.keep(node, dim, "it writes to places along that dim", remedy=_BY_MASK)
    written = _picked(r, node, out, places, picked)
    r.merge(node, [written, r.layouts.get(a["values"]) or r.align(node, a["values"], written)])
    return out


def _picked(r: Reader, node: fx.Node, source: Layout, places: list[int], picked: Layout) -> Layout:
    """Return the layout of what indices of a layout of their own pick, or write, at some dims of a source."""
    if places != list(range(places[0], places[-1] + 1)):
        r.unsupported(node, "its index tensors stand in dims that are not neighbours")
    return (*source[: places[0]], *picked, *source[places[-1] + 1 :])

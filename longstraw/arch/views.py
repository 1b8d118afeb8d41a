"""Layout rules of ops that rearrange, repeat, cut and join: the numbers stay what they are, the dims do not."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from longstraw.arch.rules import IN_TILES, Reader, arguments, packet, tensors
from longstraw.compat import expression, hint
from longstraw.layout import Dim, Layout, Probe, Rows, Tokens, has

aten = torch.ops.aten
REARRANGES = (
    aten.reshape,
    aten.expand,
    aten.unsqueeze,
    aten.squeeze,
    aten.transpose,
    aten.permute,
    aten.slice,
    aten.repeat,
    aten.repeat_interleave,
)
"""Ops of a carved graph that only rearrange, repeat and leave out numbers."""


def reshaped(r: Reader, node: fx.Node) -> Layout:
    """Same elements in the same order, other dims: factors are regrouped."""
    source = r.operand(node, tensors(node.args)[0])
    return regroup(r, node, source, r.shape(node))


def regroup(r: Reader, node: fx.Node, source: Layout, shape: tuple[Probe, ...]) -> Layout:
    """Deal the factors of `source`, in memory order, to dims of the given sizes."""
    factors = [factor for dim in source for factor in dim if factor != (1, 1)]
    dims: list[Dim] = []
    for i, size in enumerate(shape):
        dim: list[Any] = []
        left = size
        while left != (1, 1):
            if not factors:
                r.unsupported(node, "the new sizes don't regroup its dims")
            factor = factors.pop(0)
            have = r.sizes.of(factor)
            if all(a % b == 0 for a, b in zip(left, have, strict=True)):
                dim.append(factor)
                left = (left[0] // have[0], left[1] // have[1])
            elif isinstance(factor, tuple) and all(b % a == 0 for a, b in zip(left, have, strict=True)):
                dim.append(left)
                factors.insert(0, (have[0] // left[0], have[1] // left[1]))
                left = (1, 1)
            else:
                r.unsupported(node, "the new sizes cut through the token or row dim")
        # A window of one token stays where it was, or belongs to what stands before it: not to what comes after.
        ones: Iterator[Any] = itertools.takewhile(lambda factor: r.sizes.of(factor) == (1, 1), tuple(factors))
        if size == (1, 1):
            ones = itertools.islice(ones, 1)
        elif shape[i + 1 : i + 2] == ((1, 1),):
            ones = iter(())
        dim += [factors.pop(0) for _ in ones]
        dims.append(tuple(dim))
    if any(r.sizes.of(f) != (1, 1) for f in factors):
        r.unsupported(node, "the new sizes don't regroup its dims")
    return tuple(dims)


def permuted(r: Reader, node: fx.Node) -> Layout:
    """Dims in another order."""
    a = arguments(node)
    source = r.operand(node, tensors(node.args)[0])
    rank = len(source)
    name = packet(node.target)
    if name is aten.permute:
        order = [d % rank for d in a["dims"]]
    elif name in (aten.transpose, aten.swapaxes, aten.swapdims):
        one, two = (d % rank for d in (v for k, v in a.items() if k != "self"))
        order = list(range(rank))
        order[one], order[two] = order[two], order[one]
    elif name in (aten.t, aten.numpy_T, aten.mT, aten.adjoint):
        order = [*range(rank - 2), rank - 1, rank - 2] if rank > 1 else list(range(rank))
    else:  # movedim
        moved = [a["source"]] if isinstance(a["source"], int) else a["source"]
        to = [a["destination"]] if isinstance(a["destination"], int) else a["destination"]
        order = [d for d in range(rank) if d not in {m % rank for m in moved}]
        for target, m in sorted((t % rank, m % rank) for t, m in zip(to, moved, strict=True)):
            order.insert(target, m)
    return tuple(source[d] for d in order)


def expanded_as(r: Reader, node: fx.Node) -> Layout:
    """Dims of size 1 repeated up to those of another value."""
    x, other = tensors(node.args)
    if other not in r.layouts:
        return expanded(r, node)
    out = r.layouts[other]
    return r.merge(node, [out, r.layouts.get(x) or r.align(node, x, out)])


def expanded(r: Reader, node: fx.Node) -> Layout:
    """Dims of size 1 repeated; a new dim is judged by its size."""
    source = r.operand(node, tensors(node.args)[0])
    shape = r.shape(node)
    source = ((),) * (len(shape) - len(source)) + source
    dims: list[Dim] = []
    for i, (size, dim) in enumerate(zip(shape, source, strict=True)):
        if size == r.sizes.of_dim(dim):
            dims.append(dim)
        elif dim == ():
            located = r.sizes.locate(size, first=i == 0)
            if located is None:
                r.unsupported(node, "it expands to a size that is neither rows nor tokens of the step")
            dims.append(located)
        elif has(dim, Tokens) or has(dim, Rows):  # repeat: the whole dim again and again
            count = size[0] // r.sizes.of_dim(dim)[0]
            dims.append(((count, count), *dim))
        else:
            dims.append((size,))
    return tuple(dims)


def repeat_interleave(r: Reader, node: fx.Node) -> Layout:
    """Each entry of a plain dim several times."""
    a = arguments(node)
    source = r.operand(node, tensors(node.args)[0])
    shape = r.shape(node)
    if a["dim"] is None:
        r.unsupported(node, "it flattens its input")
    d = a["dim"] % len(source)
    if source[d] == ():
        return (*source[:d], r.sizes.locate(shape[d], first=d == 0) or (shape[d],), *source[d + 1 :])
    if has(source[d], Tokens) or has(source[d], Rows):
        count = shape[d][0] // r.sizes.of_dim(source[d])[0]
        return (*source[:d], (*source[d], (count, count)), *source[d + 1 :])
    return (*source[:d], (shape[d],), *source[d + 1 :])


def sliced(r: Reader, node: fx.Node) -> Layout:
    """A range of one dim; on the token dim it narrows the window."""
    a = arguments(node)
    source = r.operand(node, a["self"])
    d = a["dim"] % len(source)
    dim = source[d]
    if not (has(dim, Tokens) or has(dim, Rows)) and not r.sizes.is_static(r.shape(node)[d]):
        r.unsupported(
            node, "it cuts a table that learns to the number of tokens: look positions up with F.embedding instead"
        )
    if not (has(dim, Tokens) or has(dim, Rows)) or r.shape(node)[d] == r.sizes.of_dim(dim):
        size = r.shape(node)[d]
        return (
            *source[:d],
            () if size == (1, 1) else (size,) if size != r.sizes.of_dim(dim) else dim,
            *source[d + 1 :],
        )
    if dim != (dim[0],) or not isinstance(dim[0], Tokens):
        r.keep(
            node,
            dim,
            "it takes a part of the rows" if has(dim, Rows) else "it takes a part of the tokens",
            remedy=IN_TILES,
        )
    token = dim[0]
    assert isinstance(token, Tokens)
    if a["step"] != 1:
        r.mixes_tokens(node, f"it takes every {a['step']}th token")
    whole = a["self"].meta["val"].shape[d]
    start, stop = _bound(a["start"], whole, 0), _bound(a["end"], whole, whole)
    return (*source[:d], (Tokens(token.start + start, token.start + stop),), *source[d + 1 :])


def _bound(value: Any, size: Any, default: Any) -> Any:
    """Return a slice's bound as an expression between 0 and the dim's size, its place judged by the traced call."""
    raw = default if value is None else value.meta["val"] if isinstance(value, fx.Node) else value
    at = hint(raw) + hint(size) if hint(raw) < 0 else hint(raw)
    if at < 0 or at > hint(size):
        return expression(0 if at < 0 else size)
    return expression(raw) + expression(size) if hint(raw) < 0 else expression(raw)


def selected(r: Reader, node: fx.Node) -> Layout:
    """One entry of a dim."""
    a = arguments(node)
    source = r.operand(node, a["self"])
    d = a["dim"] % len(source)
    r.keep(node, source[d], "it takes one entry of that dim", remedy=IN_TILES)
    return source[:d] + source[d + 1 :]


def split(r: Reader, node: fx.Node) -> tuple[Layout, ...]:
    """A plain dim in pieces."""
    a = arguments(node)
    source = r.operand(node, a["self"])
    d = a["dim"] % len(source)
    r.keep(node, source[d], "it splits that dim", remedy=IN_TILES)
    if packet(node.target) is aten.unbind:
        return tuple(source[:d] + source[d + 1 :] for _ in node.meta["val"])
    pieces = [r.sizes.shape(value)[d] for value in node.meta["val"]]
    return tuple((*source[:d], () if size == (1, 1) else (size,), *source[d + 1 :]) for size in pieces)


def getitem(r: Reader, node: fx.Node) -> Any:
    """One of several outputs."""
    return r.layouts[node.args[0]][node.args[1]]  # type: ignore[index]


def concatenated(r: Reader, node: fx.Node) -> Layout:
    """Operands side by side along a plain dim (`cat`) or a new one (`stack`)."""
    a = arguments(node)
    parts = a["tensors"]
    rank = len(node.meta["val"].shape)
    d = a["dim"] % rank
    new = packet(node.target) is aten.stack
    region = [r.layouts[x] for x in parts if x in r.layouts]
    like = region[0] if region else None
    layouts: list[Layout] = []
    for part in parts:
        if part in r.layouts or like is None:
            layouts.append(r.operand(node, part))
        else:
            at = like if new else (*like[:d], (r.shape(part)[d],), *like[d + 1 :])
            layouts.append(r.align(node, part, at))
    if not new:
        for layout in layouts:
            r.keep(node, layout[d], "it joins values along that dim", remedy=IN_TILES)
        layouts = [(*layout[:d], (), *layout[d + 1 :]) for layout in layouts]
    out = r.merge(node, layouts)
    size = r.shape(node)[d]
    return (*out[:d], (size,), *out[d:]) if new else (*out[:d], (size,), *out[d + 1 :])


def complex_view(r: Reader, node: fx.Node) -> Layout:
    """The last dim's pairs as complex numbers, or back."""
    source = r.operand(node, tensors(node.args)[0])
    return source[:-1] if packet(node.target) is aten.view_as_complex else (*source, ((2, 2),))

"""Layout rules of ATen ops: what each result's dims run over.

Ops tagged `torch.Tag.pointwise` need no entry. An op without a rule that meets the token dim is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from longstraw.arch import indexing, moe, scans
from longstraw.arch.rules import LayoutRule, Reader, arguments, packet, tensors
from longstraw.compat import expression, hint
from longstraw.layout import ROWS, Dim, Layout, Probe, Rows, Tokens, has

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


def pointwise(r: Reader, node: fx.Node) -> Layout:
    """Elementwise on operands broadcast against one another."""
    region = [r.layouts[x] for x in tensors((node.args, node.kwargs)) if x in r.layouts]
    others = [x for x in tensors((node.args, node.kwargs)) if x not in r.layouts]
    if region:
        out = r.merge(node, region)
        extended = [r.align(node, x, out) for x in others]
        return r.merge(node, [out, *extended])
    return r.merge(node, [r.operand(node, x) for x in others])


def like_first(r: Reader, node: fx.Node) -> Layout:
    """Same layout as the first tensor operand (`zeros_like`, `clone`, ...)."""
    return r.operand(node, tensors(node.args)[0])


def created(r: Reader, node: fx.Node) -> Layout:
    """A new tensor: judged by its sizes."""
    located = r.sizes.locate_shape(r.shape(node))
    if located is None:
        r.unsupported(node, "it creates a tensor whose size is neither rows nor tokens of the step")
    return located


def reshaped(r: Reader, node: fx.Node) -> Layout:
    """Same elements in the same order, other dims: factors are regrouped."""
    source = r.operand(node, tensors(node.args)[0])
    return regroup(r, node, source, r.shape(node))


def regroup(r: Reader, node: fx.Node, source: Layout, shape: tuple[Probe, ...]) -> Layout:
    """Deal the factors of `source`, in memory order, to dims of the given sizes."""
    factors = [factor for dim in source for factor in dim]
    dims: list[Dim] = []
    for size in shape:
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
            node, "it cuts a trained table to the number of tokens: look positions up with F.embedding instead"
        )
    if not (has(dim, Tokens) or has(dim, Rows)) or r.shape(node)[d] == r.sizes.of_dim(dim):
        size = r.shape(node)[d]
        return (
            *source[:d],
            () if size == (1, 1) else (size,) if size != r.sizes.of_dim(dim) else dim,
            *source[d + 1 :],
        )
    if dim != (dim[0],) or not isinstance(dim[0], Tokens):
        r.keep(node, dim, "it takes a part of the rows" if has(dim, Rows) else "it takes a part of the tokens")
    token = dim[0]
    assert isinstance(token, Tokens)
    if a["step"] != 1:
        r.mixes_tokens(node, f"it takes every {a['step']}th token")
    size = token.stop - token.start
    start, stop = (_bound(a[k], size, default) for k, default in (("start", 0), ("end", size)))
    return (*source[:d], (Tokens(token.start + start, token.start + stop),), *source[d + 1 :])


def _bound(value: Any, size: Any, default: Any) -> Any:
    """Return a slice's bound as a non-negative expression, its sign judged by the traced call."""
    if value is None:
        return expression(default) if isinstance(default, int) else default
    raw = value.meta["val"] if isinstance(value, fx.Node) else value
    if isinstance(raw, int) and raw >= 2**62:
        return size
    expr = expression(raw)
    return expr + size if hint(raw) < 0 else expr


def selected(r: Reader, node: fx.Node) -> Layout:
    """One entry of a dim."""
    a = arguments(node)
    source = r.operand(node, a["self"])
    d = a["dim"] % len(source)
    r.keep(node, source[d], "it takes one entry of that dim")
    return source[:d] + source[d + 1 :]


def split(r: Reader, node: fx.Node) -> tuple[Layout, ...]:
    """A plain dim in pieces."""
    a = arguments(node)
    source = r.operand(node, a["self"])
    d = a["dim"] % len(source)
    r.keep(node, source[d], "it splits that dim")
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
            r.keep(node, layout[d], "it joins values along that dim")
        layouts = [(*layout[:d], (), *layout[d + 1 :]) for layout in layouts]
    out = r.merge(node, layouts)
    size = r.shape(node)[d]
    return (*out[:d], (size,), *out[d:]) if new else (*out[:d], (size,), *out[d + 1 :])


def reduced(r: Reader, node: fx.Node) -> Any:
    """Sums, means, norms, maxima, softmax, sorts, top-k: along plain dims only."""
    a = arguments(node)
    source = r.operand(node, a["self"] if "self" in a else a["input"])
    dims = a.get("dim", a.get("dims"))
    if dims is None or dims == []:
        dims = list(range(len(source)))
    dims = [d % len(source) for d in ([dims] if isinstance(dims, int) else dims)]
    for d in dims:
        r.keep(node, source[d], "it reduces, orders or shifts along that dim")
    values = node.meta["val"]
    outs = values if isinstance(values, (tuple, list)) else (values,)
    layouts = []
    for value in outs:
        shape = r.sizes.shape(value)
        if len(shape) == len(source):
            layouts.append(
                tuple(
                    (() if shape[i] == (1, 1) else dim if shape[i] == r.sizes.of_dim(dim) else (shape[i],))
                    if i in dims
                    else dim
                    for i, dim in enumerate(source)
                )
            )
        else:
            layouts.append(tuple(dim for i, dim in enumerate(source) if i not in dims))
    return tuple(layouts) if isinstance(values, (tuple, list)) else layouts[0]


def accumulated(r: Reader, node: fx.Node) -> Any:
    """A running sum: along tokens it carries the sum so far."""
    a = arguments(node)
    source = r.operand(node, a["self"])
    d = a["dim"] % len(source)
    return scans.summed(r, node, source, d) if has(source[d], Tokens) else reduced(r, node)


def normalised(r: Reader, node: fx.Node) -> Layout:
    """Layer and RMS norms over the last dims."""
    a = arguments(node)
    source = r.operand(node, a["input"])
    for d in range(len(source) - len(a["normalized_shape"]), len(source)):
        r.keep(node, source[d], "it normalises over that dim")
    return source


def batch_norm(r: Reader, node: fx.Node) -> Layout:
    """A factor and a summand per channel, in eval mode."""
    a = arguments(node)
    source = r.operand(node, a["input"])
    if a["training"]:
        r.mixes_rows(node, "in training mode its statistics are taken over all rows and tokens")
    r.keep(node, source[1], "it normalises over that dim")
    return source


def linear(r: Reader, node: fx.Node) -> Layout:
    """x @ weight.T"""
    a = arguments(node)
    source = r.operand(node, a["input"])
    weight = r.operand(node, a["weight"])
    for dim in (source[-1], *weight):
        r.keep(node, dim, "it sums over that dim")
    return (*source[:-1], *(weight[:1] if len(weight) == 2 else ()))


def matmul(r: Reader, node: fx.Node) -> Layout:
    """Batched matrix product: the inner dims are summed over."""
    nodes = tensors(node.args)
    left, right = nodes[-2:]  # baddbmm and addmm take the summand first
    a, b = r.operand(node, left), r.operand(node, right)
    r.keep(node, a[-1], "it sums over that dim")
    r.keep(node, b[-2] if len(b) > 1 else b[-1], "it sums over that dim")
    batch = r.merge(node, [x for x in (a[:-2], b[:-2]) if x] or [()])
    out = (*batch, *(a[-2:-1] if len(a) > 1 else ()), *(b[-1:] if len(b) > 1 else ()))
    for summand in nodes[:-2]:
        if summand in r.layouts:
            out = r.merge(node, [out, r.layouts[summand]])
        else:
            r.align(node, summand, out)
    return out


def einsum(r: Reader, node: fx.Node) -> Layout:
    """Letters that don't reach the result are summed over."""
    a = arguments(node)
    equation = a["equation"].replace(" ", "")
    left, right = equation.split("->") if "->" in equation else (equation, None)
    if right is None or "." in equation:
        r.unsupported(node, "only einsum equations with `->` and without `...` are understood")
    letters: dict[str, Dim] = {}
    for term, operand in zip(left.split(","), a["tensors"], strict=True):
        for letter, dim in zip(term, r.operand(node, operand), strict=True):
            known = letters.get(letter, ())
            letters[letter] = r.merge(node, [(known,), (dim,)])[0]
    for letter, dim in letters.items():
        if letter not in right:
            r.keep(node, dim, f"it sums over `{letter}`")
    return tuple(letters[letter] for letter in right)


def padded(r: Reader, node: fx.Node) -> Layout:
    """Constant padding of plain dims."""
    a = arguments(node)
    source = r.operand(node, a["self"])
    along_tokens = scans.padded_tokens(r, node, source)
    if along_tokens is not None:
        return along_tokens
    shape = r.shape(node)
    amounts = a["pad"]  # last dim first; a shift pads one side and cuts the other, and keeps the size
    for i, dim in enumerate(reversed(source)):
        if any(isinstance(n, fx.Node) or n != 0 for n in amounts[2 * i : 2 * i + 2]):
            r.keep(node, dim, "it pads that dim")
    return tuple(dim if r.sizes.of_dim(dim) == shape[i] else (shape[i],) for i, dim in enumerate(source))


def ordered(r: Reader, node: fx.Node) -> Any:
    """`argsort`, `sort`: along a plain dim, or of all tokens' entries (dispatch to experts)."""
    a = arguments(node)
    source = r.operand(node, a["self"])
    dim = source[a["dim"] % len(source)]
    return moe.ordered_tokens(r, node, source) if has(dim, Tokens) or has(dim, Rows) else reduced(r, node)


def attention(r: Reader, node: fx.Node) -> Layout:
    """The mixing op: queries, keys and values `[rows, heads, tokens, width]`, all over the same tokens."""
    query, key, value = (r.operand(node, x) for x in node.args[:3])  # type: ignore[arg-type]
    for name, layout in (("queries", query), ("keys", key), ("values", value)):
        token_dim = layout[2]
        if len(token_dim) != 1 or not isinstance(token_dim[0], Tokens):
            r.unsupported(node, f"dim 2 of its {name} is not the token dim")
        if not r.same_window(token_dim[0], r.sizes.full):
            r.unsupported(node, f"its {name} are a part of the tokens")
        if any(has(layout[d], Tokens) for d in (1, 3)) or any(has(layout[d], Rows) for d in (1, 2, 3)):
            r.unsupported(node, f"its {name} are not laid out as [rows, heads, tokens, width]")
    for extra in tensors(node.args[7:9]):
        if any(has(dim, Tokens) or has(dim, Rows) for dim in r.operand(node, extra)):
            r.unsupported(node, "an operand of its scores differs between tokens")
    return (*query[:3], value[3])


def selection(r: Reader, node: fx.Node) -> Layout:
    """A choice of keys for each query: query-side values, and key-side ones `[rows, heads, tokens, width]`."""
    queries, keys, others, _, k, _, query_dims = node.args
    rows: Dim = ()
    for x, d in [*zip(queries, query_dims, strict=True), *((x, 2) for x in keys)]:  # type: ignore[arg-type, union-attr]
        layout = r.operand(node, x)
        token_dim = layout[d]
        if len(token_dim) != 1 or not isinstance(token_dim[0], Tokens) or not r.same_window(token_dim[0], r.sizes.full):
            r.unsupported(node, f"dim {d} of its operand {x.name} is not the token dim")
        elsewhere = [dim for i, dim in enumerate(layout) if i not in (0, d)]
        if layout[0] not in ((ROWS,), ()) or any(has(dim, Tokens) or has(dim, Rows) for dim in elsewhere):
            r.unsupported(node, f"its operand {x.name} is not laid out with rows first")
        rows = rows or layout[0]
    for x in others:  # type: ignore[union-attr]
        if any(has(dim, Tokens) or has(dim, Rows) for dim in r.operand(node, x)):  # type: ignore[arg-type]
            r.unsupported(node, "an operand of its scores differs between tokens")
    return rows, (r.sizes.full,), ((k, k),)  # type: ignore[return-value]


def complex_view(r: Reader, node: fx.Node) -> Layout:
    """The last dim's pairs as complex numbers, or back."""
    source = r.operand(node, tensors(node.args)[0])
    return source[:-1] if packet(node.target) is aten.view_as_complex else (*source, ((2, 2),))


_REDUCTIONS = (
    "sum mean amax amin max min prod var std var_mean norm linalg_vector_norm logsumexp softmax log_softmax _softmax "
    "_log_softmax _safe_softmax argmax argmin topk cumprod any all count_nonzero softmin roll flip"
)
_VIEWS = "view reshape _unsafe_view flatten unflatten squeeze unsqueeze view_as reshape_as"
_CREATION = "zeros ones full empty arange new_zeros new_ones new_full new_empty eye scalar_tensor"
_SAME = "zeros_like ones_like full_like empty_like detach clone contiguous alias to _to_copy lift_fresh_copy type_as"
_TRIANGLES = "tril triu"


def _table() -> dict[Any, LayoutRule]:
    groups: list[tuple[str, LayoutRule]] = [
        (_REDUCTIONS, reduced),
        (_VIEWS, reshaped),
        (_CREATION, created),
        (_SAME, like_first),
        ("permute transpose swapaxes swapdims t mT adjoint numpy_T movedim", permuted),
        ("expand repeat expand_as", expanded),
        ("repeat_interleave", repeat_interleave),
        ("slice narrow", sliced),
        ("select", selected),
        ("split split_with_sizes chunk unbind tensor_split", split),
        ("cat concat stack", concatenated),
        ("layer_norm rms_norm _fused_rms_norm", normalised),
        ("batch_norm", batch_norm),
        ("linear", linear),
        ("matmul bmm mm baddbmm addmm addbmm mv", matmul),
        ("einsum", einsum),
        ("embedding", indexing.embedding),
        ("gather", indexing.gathered),
        ("scatter scatter_add scatter_reduce index_add", indexing.scattered),
        ("slice_scatter select_scatter", indexing.slice_scattered),
        ("pad constant_pad_nd", padded),
        ("index", indexing.indexed),
        ("argsort sort", ordered),
        ("index_put", moe.inverse_written),
        ("histc bincount", moe.histogram),
        ("cumsum", accumulated),
        ("_grouped_mm", moe.grouped_mm),
        ("view_as_complex view_as_real", complex_view),
        ("where masked_fill clamp polar addcmul lerp bitwise_not floor_divide", pointwise),
    ]
    table = {getattr(aten, name): rule for names, rule in groups for name in names.split() if hasattr(aten, name)}
    return {**table, **moe.LIBRARY_RULES, **scans.RULES}


RULES: dict[Any, LayoutRule] = _table()


def is_pointwise(target: Any) -> bool:
    """Return whether an op is elementwise on its broadcast operands."""
    return torch.Tag.pointwise in getattr(target, "tags", ())

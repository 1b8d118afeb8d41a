"""Layout rules of ATen ops: what each result's dims run over.

Ops tagged `torch.Tag.pointwise` need no entry. An op without a rule that meets the token dim is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from longstraw.arch import indexing, moe, scans, views
from longstraw.arch.rules import LayoutRule, Reader, arguments, tensors
from longstraw.layout import ROWS, Dim, Layout, Rows, Tokens, has

aten = torch.ops.aten


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
    operands = [r.operand(node, x) for x in a["tensors"]]
    terms, result = einsum_letters(a["equation"], [len(layout) for layout in operands])
    letters: dict[str, Dim] = {}
    for term, layout in zip(terms, operands, strict=True):
        for letter, dim in zip(term, layout, strict=True):
            known = letters.get(letter, ())
            letters[letter] = r.merge(node, [(known,), (dim,)])[0]
    for letter, dim in letters.items():
        if letter not in result:
            r.keep(node, dim, f"it sums over `{letter}`")
    return tuple(letters[letter] for letter in result)


def einsum_letters(equation: str, ranks: list[int]) -> tuple[list[list[str]], list[str]]:
    """Return an einsum's letters of every operand's dims and of the result's; `...` becomes numbered names.

    Without `->` the result has the dims of `...`, and then the letters that stand once, in alphabetical order.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    spared = [rank - len(term.replace("...", "")) for term, rank in zip(terms, ranks, strict=True)]
    spelled = [_spelled(term, count) for term, count in zip(terms, spared, strict=True)]
    most = max((count for term, count in zip(terms, spared, strict=True) if "..." in term), default=0)
    if not arrow:
        once = [letter for letter in sorted(set(left) - set(".,")) if left.count(letter) == 1]
        return spelled, [*_spelled("...", most), *once]
    return spelled, _spelled(right, most)


def _spelled(term: str, spared: int) -> list[str]:
    """Return a term's letters; the `spared` dims of `...` are numbered from the last one."""
    before, dots, after = term.partition("...")
    return [*before, *(str(i) for i in reversed(range(spared if dots else 0))), *after]


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


def parametric_relu(r: Reader, node: fx.Node) -> Layout:
    """One slope, or one for each entry of dim 1."""
    a = arguments(node)
    source, slopes = r.operand(node, a["self"]), r.operand(node, a["weight"])
    if any(dim != () for dim in slopes):
        for dim in (source[min(1, len(source) - 1)], *slopes):
            r.keep(node, dim, "it has a slope for each entry of that dim")
    return source


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


_REDUCTIONS = (
    "sum mean amax amin max min prod var std var_mean norm linalg_vector_norm logsumexp softmax log_softmax _softmax "
    "_log_softmax _safe_softmax argmax argmin topk cumprod any all count_nonzero softmin roll flip glu"
)
_VIEWS = "view reshape _unsafe_view flatten unflatten squeeze unsqueeze view_as reshape_as"
_CREATION = "zeros ones full empty arange new_zeros new_ones new_full new_empty eye scalar_tensor"
_SAME = (
    "zeros_like ones_like full_like empty_like detach clone contiguous alias to _to_copy lift_fresh_copy type_as real "
    "imag conj _conj resolve_conj resolve_neg"
)
_TRIANGLES = "tril triu"


def _table() -> dict[Any, LayoutRule]:
    groups: list[tuple[str, LayoutRule]] = [
        (_REDUCTIONS, reduced),
        (_VIEWS, views.reshaped),
        (_CREATION, created),
        (_SAME, like_first),
        ("permute transpose swapaxes swapdims t mT adjoint numpy_T movedim", views.permuted),
        ("expand repeat", views.expanded),
        ("expand_as", views.expanded_as),
        ("repeat_interleave", views.repeat_interleave),
        ("slice narrow", views.sliced),
        ("select", views.selected),
        ("split split_with_sizes chunk unbind tensor_split", views.split),
        ("cat concat stack", views.concatenated),
        ("layer_norm rms_norm _fused_rms_norm", normalised),
        ("batch_norm", batch_norm),
        ("prelu _prelu_kernel", parametric_relu),
        ("linear", linear),
        ("matmul bmm mm baddbmm addmm addbmm mv", matmul),
        ("einsum", einsum),
        ("embedding", indexing.embedding),
        ("gather", indexing.gathered),
        ("take_along_dim", indexing.taken_along),
        ("scatter scatter_add scatter_reduce index_add index_copy index_fill", indexing.scattered),
        ("slice_scatter select_scatter", indexing.slice_scattered),
        ("pad constant_pad_nd", padded),
        ("index", indexing.indexed),
        ("argsort sort", ordered),
        ("index_put", indexing.index_written),
        ("histc bincount", moe.histogram),
        ("cumsum", accumulated),
        ("_grouped_mm", moe.grouped_mm),
        ("view_as_complex view_as_real", views.complex_view),
        ("where masked_fill clamp complex polar addcmul lerp bitwise_not floor_divide log_sigmoid", pointwise),
    ]
    table = {getattr(aten, name): rule for names, rule in groups for name in names.split() if hasattr(aten, name)}
    return {**table, **moe.LIBRARY_RULES, **scans.RULES}


RULES: dict[Any, LayoutRule] = _table()


def is_pointwise(target: Any) -> bool:
    """Return whether an op is elementwise on its broadcast operands."""
    return torch.Tag.pointwise in getattr(target, "tags", ())

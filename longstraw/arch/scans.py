"""Layout rules of mixing ops with boundary state: library scans, causal convolutions, shifts, running
sums.

A rule tells the reader what its op carries from span to span; everything else (saving, relaying gradients, restarting)
follows from that.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import fx

from longstraw.arch.rules import LayoutRule, Reader, arguments, packet
from longstraw.arch.spellings import COPIES
from longstraw.compat import expression
from longstraw.layout import ROWS, Dim, Layout, Rows, Tokens, has
from longstraw.scans import delta_rule, linear_recurrence, opaque, short_conv
from longstraw.scans.opaque import NAMESPACE
from longstraw.stages import SpanForm

aten = torch.ops.aten


def refused(reader: Reader, node: fx.Node) -> NoReturn:
    """A scan that was called with something else than tensors."""
    reader.unsupported(node, str(node.args[1]))


def may_mix(node: fx.Node) -> bool:
    """Return whether an op is a mixing op with boundary state, if it runs over tokens."""
    return packet(node.target) is aten.conv1d or getattr(node.target, "namespace", "") == NAMESPACE


def scanned(r: Reader, node: fx.Node, *, step: opaque.Step) -> tuple[Layout, Layout]:
    """A library scan of values `[rows, tokens, ...]` and weights: its output, and the state after the last token."""
    inputs: Any
    inputs, start = node.args
    if start is not None:
        r.unsupported(node, "it starts from a state that the model passes in, such as that of a cache")
    out, state = node.meta["val"]
    rows: Dim = ()
    for x in inputs:
        layout = r.operand(node, x)
        if not any(has(dim, Tokens) or has(dim, Rows) for dim in layout):
            continue
        first, second, *rest = layout
        if second != (r.sizes.full,) and not (len(second) == 1 and _is_whole(r, second[0])):
            r.unsupported(node, f"dim 1 of its input {x.name} is not the token dim")
        if first not in ((ROWS,), ()) or any(has(dim, Tokens) or has(dim, Rows) for dim in rest):
            r.unsupported(node, f"its input {x.name} is not laid out as [rows, tokens, ...]")
        rows = rows or first
    if any(user.args[1] == 1 for user in node.users):
        r.unsupported(node, "its state after the last token leaves the model")
    r.scans[node] = SpanForm(step, _first_argument, _plain(state.shape[1:]), state.dtype, pair=True)
    plain = [() if size == (1, 1) else (size,) for size in r.sizes.shape(out)[2:]]
    kept = [() if size == (1, 1) else (size,) for size in r.sizes.shape(state)[1:]]
    return (rows, (r.sizes.full,), *plain), (rows, *kept)


def _first_argument(node: fx.Node) -> tuple[Any, ...]:
    inputs: Any = node.args[0]
    return tuple(inputs)


def _plain(sizes: Iterable[Any]) -> tuple[int, ...]:
    return tuple(int(size) for size in sizes)


def _is_whole(r: Reader, factor: Any) -> bool:
    return isinstance(factor, Tokens) and r.same_window(factor, r.sizes.full)


def convolved(r: Reader, node: fx.Node) -> Layout:
    """A convolution. Along tokens its result is labelled by the last token that each entry reads."""
    a = arguments(node)
    source = r.operand(node, a["input"])
    weight = a["weight"].meta["val"]
    out_channels = (r.sizes.probe(weight.shape[0]),)
    if len(source) != 3:
        r.unsupported(node, "its input has no batch dim")
    r.keep(node, source[1], "it sums over that dim")
    if not has(source[2], Tokens):
        r.keep(node, source[2], "it sums over that dim")
        return (source[0], out_channels, (r.shape(node)[2],))
    (padding,), (stride,), (dilation,) = (
        x if isinstance(x, (list, tuple)) else (x,) for x in (a["padding"], a["stride"], a["dilation"])
    )
    width = int(weight.shape[2])
    token = source[2][0]
    if len(source[2]) != 1 or not isinstance(token, Tokens) or source[0] not in ((ROWS,), ()):
        r.unsupported(node, "its input is not laid out as [rows, channels, tokens]")
    if stride != 1 or not isinstance(padding, int):
        r.unsupported(node, "it convolves tokens with a stride or with padding given by name")
    if r.sizes.probe(token.start) != (0, 0) and not _is_zero_padding(a["input"], token):
        r.unsupported(node, "its input doesn't begin with the first token")
    reach = dilation * (width - 1)
    channels = int(a["input"].meta["val"].shape[1])
    dtype = a["input"].meta["val"].dtype
    groups = int(a["groups"])

    def step_arguments(n: fx.Node) -> tuple[Any, ...]:
        b = arguments(n)
        return b["input"], b["weight"], b["bias"], dilation, groups

    r.scans[node] = SpanForm(short_conv.causal_conv, step_arguments, (channels, reach), dtype, pair=False)
    return (source[0], out_channels, (Tokens(token.start - padding + reach, token.stop + padding),))


def _is_zero_padding(node: fx.Node, token: Tokens) -> bool:
    """Return whether a value `[rows, channels, tokens]` has zeros, from a padding, for all tokens before the first."""
    while packet(node.target) in COPIES:
        node = node.args[0]  # type: ignore[assignment]
    if packet(node.target) not in (aten.pad, aten.constant_pad_nd):
        return False
    before, *others = arguments(node)["pad"]  # what pads tokens itself was checked to begin at token 0
    before = expression(before.meta["val"] if isinstance(before, fx.Node) else before)
    return bool(before.is_positive and token.start + before == 0) and not any(others[1:])


def padded_tokens(r: Reader, node: fx.Node, source: Layout) -> Layout | None:
    """Zeros before the first token or after the last; None when the padding leaves the token dim alone."""
    a = arguments(node)
    amounts = a["pad"]
    places = [
        i for i in range(len(amounts) // 2) if any(isinstance(n, fx.Node) or n for n in amounts[2 * i : 2 * i + 2])
    ]
    d = len(source) - 1 - places[0] if places else None
    if d is None or len(places) != 1 or not has(source[d], Tokens):
        return None
    token = source[d][0]
    if len(source[d]) != 1 or not isinstance(token, Tokens):
        r.unsupported(node, "it pads a dim of rows and tokens")
    if a.get("mode", "constant") != "constant" or a["value"] not in (None, 0, 0.0):
        r.unsupported(node, "it pads tokens with something else than zeros")
    pair = amounts[2 * places[0] : 2 * places[0] + 2]
    before, after = (expression(n.meta["val"] if isinstance(n, fx.Node) else n) for n in pair)
    if (
        before.is_Integer
        and before > 0
        and after.is_Integer
        and after <= 0
        and r.same_window(Tokens(token.start, token.stop + after + before), r.sizes.full)
    ):
        return _shifted(r, node, source, d, int(before))
    if not _is_whole(r, token):
        r.unsupported(node, "it pads a part of the tokens, or tokens that are padded already")
    return (*source[:d], (Tokens(token.start - before, token.stop + after),), *source[d + 1 :])


def _shifted(r: Reader, node: fx.Node, source: Layout, d: int, by: int) -> Layout:
    """Zeros before the first token, and as many of the last ones cut off: every token gets the value of another."""
    if source[0] not in ((ROWS,), ()) or d == 0:
        r.unsupported(node, "its input is not laid out with rows first")
    value = node.meta["val"]
    sizes = _plain(by if i == d else size for i, size in enumerate(value.shape) if i != 0)
    r.scans[node] = SpanForm(short_conv.shift, lambda n: (n.args[0], d, by), sizes, value.dtype, pair=False)
    return (*source[:d], (r.sizes.full,), *source[d + 1 :])


def summed(r: Reader, node: fx.Node, source: Layout, d: int) -> Layout:
    """A running sum along tokens."""
    token = source[d][0]
    if len(source[d]) != 1 or not _is_whole(r, token):
        r.unsupported(node, "it sums a part of the tokens")
    if source[0] not in ((ROWS,), ()) or d == 0:
        r.unsupported(node, "its input is not laid out with rows first")
    value = node.meta["val"]
    if not value.is_floating_point():
        r.unsupported(node, "it sums integers along tokens of hidden values")
    sizes = _plain(size for i, size in enumerate(value.shape) if i not in (0, d))
    dtype = torch.promote_types(value.dtype, torch.float32)
    r.scans[node] = SpanForm(
        short_conv.running_sum,
        lambda n: (n.args[0], d, value.dtype),
        sizes,
        dtype,
        pair=False,
    )
    return source


RULES: dict[Any, LayoutRule] = {
    aten.conv1d: convolved,
    opaque.REFUSED: refused,
    opaque.GATED_DELTA_RULE: functools.partial(scanned, step=delta_rule.gated_delta_rule),
    opaque.LINEAR_ATTENTION: functools.partial(scanned, step=delta_rule.linear_attention),
    opaque.LINEAR_RECURRENCE: functools.partial(scanned, step=linear_recurrence.linear_recurrence),
    opaque.SELECTIVE_SCAN: functools.partial(scanned, step=linear_recurrence.selective_scan),
}

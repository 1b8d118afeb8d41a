"""Layout rules of mixing ops with boundary state: library scans, causal convolutions, running sums.

A rule tells the reader what its op carries from span to span; everything else (saving, relaying gradients, restarting)
follows from that.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from longstraw.arch.rules import LayoutRule, Reader, arguments, packet
from longstraw.compat import expression, without_modes
from longstraw.errors import OptionsError, UnsupportedOp, user_line
from longstraw.layout import ROWS, Dim, Layout, Probe, Rows, Tokens, has
from longstraw.scans import delta_rule, linear_recurrence, opaque, short_conv
from longstraw.scans.opaque import NAMESPACE
from longstraw.stages import SpanForm

aten = torch.ops.aten


@dataclass(frozen=True)
class Scan:
    """A user's rule for a function that runs a recurrence over tokens: traced as one node, run span by span.

    `function(*inputs) -> output` takes tensors only: values `[rows, tokens, ...]`, and weights of other shapes.
    `step` computes the same for a span, given the state that the tokens before it left. Both are tried on small random
    inputs and must agree, where the function runs on the CPU.

    Attributes:
        function: the function as the model calls it, found by identity: no method.
        step: `(*inputs, state) -> (output [rows, tokens, ...], state after [rows, ...])`, differentiable.
        state: `(*inputs) -> the state before the first token`: zeros `[rows, ...]`, of a size that doesn't depend on
            tokens.
        output: `(*inputs) -> a tensor like the output`; by default it is like the first input.
    """

    function: Callable[..., Tensor]
    step: opaque.Step
    state: Callable[..., Tensor]
    output: Callable[..., Tensor] = lambda *inputs: torch.empty_like(inputs[0])

    def __post_init__(self) -> None:
        named = getattr(self.function, "__qualname__", repr(self.function))
        if not inspect.isfunction(self.function) or list(inspect.signature(self.function).parameters)[:1] == ["self"]:
            raise OptionsError(
                f"Scan(function={named}) is not a plain function: Dynamo calls it with its object.",
                remedy="Move the loop over tokens into a function of tensors in a module, and let the method call it.",
            )

    @functools.cached_property
    def target(self) -> Any:
        """The library op that stands for the function in graphs."""
        name = re.sub(r"\W", "", f"{self.function.__name__.strip('_')}_{next(_numbers)}")
        opaque.users_names[f"{NAMESPACE}.{name}"] = self.function.__name__
        return opaque.scan_op(name, self.step, output=self.output, state=self.state, fake=self._fake)

    def layout(self, reader: Reader, node: fx.Node) -> Any:
        """Its layout rule."""
        self._check(reader, node)
        try:
            return scanned(reader, node, step=self.step)
        except UnsupportedOp as error:
            raise UnsupportedOp(error.what, where=error.where, remedy=_MUST) from None

    def _fake(self, inputs: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return fake values of the output and the state.

        Where `output` or `state` is wrong the trace goes on with what the function returns: it is refused after it.
        """
        known = self._returned(inputs)
        try:
            state = torch.empty_like(self.state(*inputs))
        except Exception:
            state = inputs[0].new_empty(inputs[0].shape[:1])
        try:
            out = torch.empty_like(self.output(*inputs))
        except Exception:
            out = torch.empty_like(inputs[0])
        if known is None:
            return out, state
        symbols = dict(zip((_FEW_ROWS, _FEW_TOKENS), inputs[0].shape[:2], strict=False))
        shape = [symbols.get(size, size) if i < 2 else size for i, size in enumerate(known.shape)]
        return inputs[0].new_empty(shape, dtype=known.dtype), state

    def _returned(self, inputs: list[Tensor]) -> Tensor | None:
        """Return what the function computes of small inputs if `output` says something else; None if it doesn't."""
        shapes = [
            [x if isinstance(x, int) else few for x, few in zip(value.shape, _few(value), strict=True)]
            for value in inputs
        ]
        with without_modes():
            small = [_random(shape, x.dtype, signed=False) for shape, x in zip(shapes, inputs, strict=True)]
            whole = self._called(small)
            try:
                like = self.output(*small)
            except Exception:
                return whole
        same = whole is None or (like.shape == whole.shape and like.dtype == whole.dtype)
        return None if same else whole

    def _check(self, reader: Reader, node: fx.Node) -> None:
        """Refuse a rule that contradicts itself, tried on small random inputs."""
        values: Any = node.args[0]
        shapes = [reader.shape(x)[:2] for x in values]
        for signed in (False, True):
            inputs = [_small(reader, x, signed=signed) for x in values]
            if signed and self._called(inputs) is None:
                continue  # not what the function takes: indices out of range, or a kernel for a GPU
            try:
                found = self._contradiction(inputs, shapes, reader)
            except Exception as error:
                found = f"step fails on small inputs ({type(error).__name__}: {error})"
            if found is not None:
                self._refuse(reader, node, found)

    def _refuse(self, reader: Reader, node: fx.Node, contradiction: str) -> NoReturn:
        raise UnsupportedOp(
            f"The longstraw.Scan of {self.function.__name__} contradicts itself: its {contradiction}.",
            where=user_line(node.meta.get("stack_trace")),
            remedy=_MUST,
        )

    def _contradiction(self, inputs: list[Tensor], shapes: list[tuple[Probe, ...]], reader: Reader) -> str | None:
        """Return what is wrong with the rule, tried on inputs of these first two sizes; None if nothing is."""
        by_row = [shape[:1] == (reader.sizes.rows,) for shape in shapes]
        by_token = [shape[1:2] == (reader.sizes.tokens,) for shape in shapes]
        rows = _FEW_ROWS if any(by_row) else 1
        with torch.no_grad():
            made: dict[str, Tensor] = {}
            for name in ("state", "output"):
                try:
                    made[name] = getattr(self, name)(*inputs)
                except Exception as error:
                    return f"{name} fails on small inputs ({type(error).__name__}: {error})"
                if not isinstance(made[name], Tensor):
                    return f"{name} returns a {type(made[name]).__name__}, not a tensor"
            start, like = made["state"], made["output"]
            if start.dim() == 0 or start.shape[0] != rows:
                return f"state has no dim of rows in front: {tuple(start.shape)} for {rows} rows"
            out, last = self.step(*inputs, before := start.clone())
        if bool(start.any()) or self.state(*(x.requires_grad_(x.is_floating_point()) for x in inputs)).requires_grad:
            return "state before the first token isn't zero: add what is learned to the inputs"
        if not torch.equal(before, start):
            return "step changes the state that it is given: let it return a new one"
        if last.shape != start.shape or last.dtype != start.dtype:
            return (
                f"step returns a state {tuple(last.shape)} of {last.dtype}, and its state is "
                f"{tuple(start.shape)} of {start.dtype}"
            )
        if out.shape != like.shape or out.dtype != like.dtype:
            return (
                f"step returns an output {tuple(out.shape)} of {out.dtype}, and its output is "
                f"{tuple(like.shape)} of {like.dtype}"
            )
        whole = self._called(inputs)
        if whole is not None and not (whole.shape == out.shape and _close(whole, out, out.dtype)):
            return f"step doesn't compute what {self.function.__name__} does, tried on small inputs"
        if any(by_token):
            found = self._apart(inputs, by_token, start)
            if not (_close(found[0], out, out.dtype) and _close(found[1], last, out.dtype)):
                return "step, run on spans one after the other, doesn't compute what it does on all at once"
            if whole is not None and not self._same_gradients(inputs, by_token, start):
                return f"step, run on spans one after the other, has other gradients than {self.function.__name__}"
        if any(by_row):
            with torch.no_grad():
                row, _ = self.step(
                    *(x[1:] if r else x for x, r in zip(inputs, by_row, strict=True)), start[-1:].clone()
                )
            if not _close(row, out[1:], out.dtype):
                return "step mixes rows: a row run by itself gives something else"
        return None

    def _apart(self, inputs: list[Tensor], by_token: list[bool], state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs of spans that run one after the other, and the last state."""
        outs = []
        for cut in _SPANS:
            out, state = self.step(
                *(x[:, cut] if t else x for x, t in zip(inputs, by_token, strict=True)), state.clone()
            )
            outs.append(out)
        return torch.cat(outs, 1), state

    def _same_gradients(self, inputs: list[Tensor], by_token: list[bool], start: Tensor) -> bool:
        """Return whether spans one after the other have the gradients of the function; True where it has none."""

        def gradients(run: Callable[..., Tensor]) -> list[Tensor | None] | None:
            leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
            wanted = [x for x in leaves if x.requires_grad]
            with torch.enable_grad(), torch.autocast("cpu", enabled=False):
                out = run(*leaves)
                if not (wanted and out.requires_grad):
                    return None
                weights = torch.linspace(0.5, 1.5, out.numel(), dtype=torch.float64).reshape(out.shape).to(out.dtype)
                return list(torch.autograd.grad(out, wanted, weights, allow_unused=True))

        expected = gradients(self.function)
        if expected is None:
            return True
        found = gradients(lambda *xs: self._apart(list(xs), by_token, start)[0]) or [None] * len(expected)
        zero = torch.zeros(())
        return all(
            _close(zero if f is None else f, zero if e is None else e, zero.dtype if e is None else e.dtype)
            for f, e in zip(found, expected, strict=True)
        )

    def _called(self, inputs: list[Tensor]) -> Tensor | None:
        """Return what the function itself computes; None for a kernel that doesn't run on the CPU."""
        try:
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                return self.function(*(x.detach().clone() for x in inputs))
        except Exception:
            return None


_MUST = (
    "A Scan must satisfy: step(*inputs, state) returns (output [rows, tokens, ...], state after [rows, ...]) and "
    "computes what the function does, also on one span after the other and on each row alone; state(*inputs) returns "
    "zeros [rows, ...], of a size that doesn't depend on tokens; output(*inputs) returns a tensor like the output. "
    "Inputs are tensors, [rows, tokens, ...] or weights."
)
_numbers = itertools.count()
_FEW_ROWS, _FEW_TOKENS = 2, 19
_SPANS = (slice(0, 9), slice(9, 10), slice(10, _FEW_TOKENS))


def _close(one: Tensor, other: Tensor, computed_in: torch.dtype) -> bool:
    """Return whether two results differ by no more than the order of many roundings makes."""
    rounding = torch.finfo(computed_in).eps if computed_in.is_floating_point or computed_in.is_complex else 0.0
    tolerance = max(1e-4, 4 * rounding)
    one, other = torch.broadcast_tensors(one.double(), other.double()) if not one.is_complex() else (one, other)
    finite = other[other.isfinite()].abs()
    return torch.allclose(
        one,
        other,
        rtol=tolerance,
        atol=tolerance * max(1e-3, float(finite.max()) if len(finite) else 0.0),
        equal_nan=True,
    )


def _small(r: Reader, node: fx.Node, *, signed: bool) -> Tensor:
    """Return a random value like an operand, of few rows and tokens, on the CPU: from 0 to 1, or of either sign.

    Of integers and bools the first are zeros, and the second zeros and ones.
    """
    value = node.meta["val"]
    few = {r.sizes.rows: _FEW_ROWS, r.sizes.tokens: _FEW_TOKENS}
    shape = [probe[0] if r.sizes.is_static(probe) else few.get(probe, 1) for probe in r.shape(node)]
    return _random(shape, value.dtype, signed=signed)


def _random(shape: list[int], dtype: torch.dtype, *, signed: bool) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    if dtype.is_floating_point:
        draw = torch.randn if signed else torch.rand
        return draw(shape, generator=generator, dtype=torch.float64, device="cpu").to(dtype)
    if signed and not dtype.is_complex:
        return torch.randint(2, shape, generator=generator, device="cpu").to(dtype)
    return torch.zeros(shape, dtype=dtype, device="cpu")


def _few(value: Tensor) -> list[int]:
    """Return sizes for a small value in place of those of the trace that vary."""
    return [_FEW_ROWS, _FEW_TOKENS, *(1 for _ in value.shape)][: value.dim()]


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
    if r.sizes.probe(token.start) != (0, 0) and not _is_zero_padding(a["input"]):
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


def _is_zero_padding(node: fx.Node) -> bool:
    while packet(node.target) in (aten.to, aten._to_copy, aten.clone, aten.contiguous):
        node = node.args[0]  # type: ignore[assignment]
    return packet(node.target) in (aten.pad, aten.constant_pad_nd)


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

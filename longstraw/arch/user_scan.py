"""A user's rule for a function of their own that runs a recurrence over tokens, and what is checked of it."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from longstraw.arch.rules import Reader
from longstraw.arch.scans import scanned
from longstraw.compat import without_modes
from longstraw.errors import OptionsError, UnsupportedOp, user_line
from longstraw.layout import Probe
from longstraw.scans import opaque
from longstraw.scans.opaque import NAMESPACE


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
        tokens = self._length(reader, node)
        for signed in (False, True):
            inputs = [_small(reader, x, tokens, signed=signed) for x in values]
            if signed and self._called(inputs) is None:
                continue  # not what the function takes: indices out of range, or a kernel for a GPU
            try:
                found = self._contradiction(inputs, shapes, reader)
            except Exception as error:
                found = f"step fails on small inputs ({type(error).__name__}: {error})"
            if found is not None:
                self._refuse(reader, node, found)

    def _length(self, reader: Reader, node: fx.Node) -> int:
        """Return of how many tokens the function can be run here; warn where it can't, so that nothing is compared."""
        values: Any = node.args[0]
        problem: Exception | None = None
        for tokens in _LENGTHS:
            try:
                self._run([_small(reader, x, tokens, signed=False) for x in values])
                return tokens
            except Exception as error:
                problem = problem or error
        warnings.warn(
            f"The longstraw.Scan of {self.function.__name__} could not be compared with it: on small inputs on the CPU "
            f"it raises {type(problem).__name__}: {problem}\n  {user_line(node.meta.get('stack_trace'))}",
            stacklevel=2,
        )
        return _LENGTHS[0]

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
            return self._run(inputs)
        except Exception:
            return None

    def _run(self, inputs: list[Tensor]) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return self.function(*(x.detach().clone() for x in inputs))


_MUST = (
    "A Scan must satisfy: step(*inputs, state) returns (output [rows, tokens, ...], state after [rows, ...]) and "
    "computes what the function does, also on one span after the other and on each row alone; state(*inputs) returns "
    "zeros [rows, ...], of a size that doesn't depend on tokens; output(*inputs) returns a tensor like the output. "
    "Inputs are tensors, [rows, tokens, ...] or weights."
)
_numbers = itertools.count()
_FEW_ROWS, _FEW_TOKENS = 2, 19
_LENGTHS = (_FEW_TOKENS, 64)
"""Numbers of tokens that a rule is tried with; the first that its function takes."""
_SPANS = (slice(0, 9), slice(9, 10), slice(10, None))


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


def _small(r: Reader, node: fx.Node, tokens: int, *, signed: bool) -> Tensor:
    """Return a random value like an operand, of few rows and tokens, on the CPU: from 0 to 1, or of either sign.

    Of integers and bools the first are zeros, and the second zeros and ones.
    """
    value = node.meta["val"]
    few = {r.sizes.rows: _FEW_ROWS, r.sizes.tokens: tokens}
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

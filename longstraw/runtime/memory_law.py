"""The memory law of a step: what each part of it takes, as a formula in the sizes of the step and of its plan.

What grows with the prompt is counted from the tables of the branch; what a span takes is rehearsed at a few sizes and
taken to be linear between them. Bytes are those of live tensors on the device.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from longstraw import compat
from longstraw.options import Options
from longstraw.runtime.attention import KEY_TILE
from longstraw.runtime.key_parts import MASK_TILE
from longstraw.runtime.leaves import learning_inputs
from longstraw.runtime.numbers import Numbers
from longstraw.runtime.plan import Shape
from longstraw.runtime.rehearsal import Footprint, Rehearsal
from longstraw.stages import Lowered, Stateful

PROMPT, RESPONSE, ROWS = sympy.symbols("P R G", integer=True, positive=True)
SPAN, TAIL, SILENT, RECORDED, REPLAYED, APPENDED, SAVED = sympy.symbols(
    "span tail silent recorded replayed appended saved", integer=True, nonnegative=True
)
KEPT = sympy.Symbol("kept", nonnegative=True)
MEANING = {
    PROMPT: "tokens that rows share",
    RESPONSE: "tokens of a response",
    ROWS: "responses",
    SPAN: "tokens of a span",
    TAIL: "tokens of the prompt that keep their graph from capture to unwind",
    SILENT: "tokens without results that run beside those with results",
    RECORDED: "tokens of responses that keep their graph from score to replay",
    REPLAYED: "tokens of responses that run at once",
    APPENDED: "tokens of responses whose state is kept while they run",
    SAVED: "boundary states saved",
    KEPT: "the part of the prompt's tokens whose state later tokens can see",
}
_SPANS = (1, 64, 128, 256, 512, 1024, 2048)
"""Tokens of the spans of a prompt that are rehearsed: those that are chosen, and one."""
_RESPONSES = (1, 64, 2048)
"""Tokens of the spans of one response that are rehearsed."""
_ENDINGS = (1, 256, 2048)
"""Tokens of the spans that are rehearsed of which only the last one has results."""
_ROWS = 8
"""Responses side by side in the largest rehearsal of responses."""

_MASK_BYTES = 5
"""Of a pair of a query and a key in a tile with a mask: whether it is seen, and a bias."""
_STAGED_PARTS = 3
"""Parts of state on their way from another tier."""

Formulas = Mapping[str, sympy.Expr]


@dataclass(frozen=True)
class BranchLaw:
    """What one branch takes.

    Attributes:
        kept: what is there from capture to the end of unwind, by name, with state on the device.
        staged: the same with state on another tier.
        phases: what is there beside it at the peak of each phase, by name of the phase.
        graphs: what stays beside it until backward, while other branches run.
        waits: whether anything stays until backward.
    """

    kept: Formulas
    staged: Formulas
    phases: Formulas
    graphs: sympy.Expr
    waits: bool


@dataclass(frozen=True)
class MemoryLaw:
    """What one step takes; the symbols are those of `MEANING`.

    Attributes:
        inputs: bytes of the step's parameters and other inputs.
        computed: bytes of what is computed from them once, such as positions and parts of masks: at most so many per
            token of a row.
        branches: the laws of its branches, in the order in which they run.
        shape: of the rows that it was found with, if the prompt ends where results begin.
    """

    inputs: int
    computed: sympy.Expr
    branches: tuple[BranchLaw, ...]
    shape: Shape

    def __str__(self) -> str:
        lines = [f"weights and inputs = {self.inputs}", f"computed inputs = {self.computed}"]
        for number, branch in enumerate(self.branches):
            lines += ["", f"branch {number}, in bytes", *(f"  {name} = {f}" for name, f in branch.kept.items())]
            for name, formula in branch.phases.items():
                used = ", ".join(sorted(map(str, formula.free_symbols)))
                lines.append(f"  {name}({used}), linear between rehearsed sizes")
        return "\n".join([*lines, "", *(f"{symbol}: {meaning}" for symbol, meaning in MEANING.items())])


@functools.lru_cache(maxsize=1024)
def _function(formula: sympy.Expr) -> Callable[..., float]:
    return sympy.lambdify(list(MEANING), formula, "math")


def evaluated(formula: sympy.Expr, numbers: Mapping[sympy.Symbol, float]) -> int:
    """Return what a formula is worth, in whole bytes.

    Args:
        formula: of a law.
        numbers: what each symbol of `MEANING` is worth.
    """
    return int(_function(formula)(*(numbers[symbol] for symbol in MEANING)))


def memory_law(program: Lowered, inputs: Sequence[Any]) -> MemoryLaw:
    """Return the law of a compiled step.

    Args:
        program: the step.
        inputs: values of the traced graph's placeholders, in order; tensors may be on the meta device. They give sizes.
    """
    located = program.step.partitioned.step
    names = [node for node in located.module.graph.nodes if node.op == "placeholder"]
    mode = compat.new_fake_mode()
    fakes = [compat.as_fake(mode, x) if isinstance(x, Tensor) else x for x in inputs]
    values: dict[fx.Node, Any] = dict(zip(names, fakes, strict=True))
    with mode:
        light = program.prologue(*fakes)
    values.update(zip(program.light, light, strict=True))
    numbers = Numbers(located.sizes, values)
    given = {compat.memory(x) for x in fakes if isinstance(x, Tensor)}
    computed = bytes_of([x for x in light if isinstance(x, Tensor) and compat.memory(x) not in given])
    per_token = -(-computed // (numbers.rows * numbers.tokens))  # measured for these sizes, and rounded up
    rehearsals = [
        Rehearsal(branch, values, numbers, learns=located.learns, options=located.options, mode=mode)
        for branch in program.step.branches
    ]
    laws = [
        _branch_law(branch, rehearsal, values, learns=located.learns, options=located.options)
        for branch, rehearsal in zip(program.step.branches, rehearsals, strict=True)
    ]
    start, stop = rehearsals[0].response
    shape = Shape(prompt=start, response=stop - start, rows=numbers.rows, results=stop - start, shared=start)
    return MemoryLaw(bytes_of(fakes), per_token * ROWS * (PROMPT + RESPONSE), tuple(laws), shape)


def sampled(shape: Shape) -> tuple[int, int, int]:
    """Return how many sizes are rehearsed for a shape: of spans of the prompt, of those of a response, and rows."""
    spans, responses = bisect.bisect(_SPANS, shape.prompt), bisect.bisect(_RESPONSES, shape.results)
    return spans, responses, min(_ROWS, shape.rows)


def bytes_of(values: Sequence[Any]) -> int:
    """Return the bytes of the tensors among some values, those that share memory counted once."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    return sum({compat.memory(t): t.numel() * t.element_size() for t in tensors}.values())


def _branch_law(
    branch: Stateful,
    rehearsal: Rehearsal,
    values: Mapping[fx.Node, Any],
    *,
    learns: frozenset[fx.Node],
    options: Options,
) -> BranchLaw:
    trained = learning_inputs(branch, values, learns)
    learning = torch.is_grad_enabled() and bool(trained) and any(node in learns for node in branch.segment.results)
    unwound = learning and options.prompt_grad == "exact" and branch.state_learns
    start, stop = rehearsal.response
    prompt = {n: rehearsal.span(rows=1, lo=start - n, hi=start, appends=True) for n in _sizes(_SPANS, start)}
    response = {
        n: rehearsal.span(rows=1, lo=start, hi=start + n, appends=False) for n in _sizes(_RESPONSES, stop - start)
    }
    ending = {n: rehearsal.span(rows=1, lo=start - n, hi=start + 1, appends=False) for n in _sizes(_ENDINGS, start)}
    rows, length = min(_ROWS, rehearsal.rows), min(stop - start, _RESPONSES[-1])
    response[rows * length] = rehearsal.span(rows=rows, lo=start, hi=start + length, appends=False)
    kept, staged = _kept(branch, options, unwound=unwound)
    gradients = _gradient_bytes(trained, values, options)
    held = (_at(prompt, "held", TAIL) if unwound else sympy.Integer(0)) + _at(response, "held", RECORDED)
    phases = {"capture": _at(prompt, "captured", SPAN)}
    scoring = _at(response, "captured", REPLAYED) + _at(ending, "captured", SILENT)
    if not learning:
        return BranchLaw(kept, staged, {**phases, "score": scoring}, sympy.Integer(0), waits=False)
    sending = _at(response, "peak", REPLAYED) + _at(ending, "peak", SILENT)
    extra = sending - _at(response, "held", REPLAYED) - _at(ending, "held", SILENT)
    phases["score"] = held + scoring
    alone = _at(prompt, "held", TAIL) if unwound else sympy.Integer(0)
    phases["replay"] = gradients + sympy.Max(alone + sending, held + extra)
    if unwound:
        phases["unwind"] = gradients + _at(prompt, "peak", SPAN)
    return BranchLaw(kept, staged, phases, held, waits=True)


def _sizes(samples: Sequence[int], most: int) -> list[int]:
    """Return the sizes to rehearse where there are so many tokens."""
    return sorted({min(n, most) for n in samples})


def _kept(branch: Stateful, options: Options, *, unwound: bool) -> tuple[Formulas, Formulas]:
    """Return what stays from capture to the end of unwind, with state on the device and with state elsewhere."""
    tokens = KEPT * PROMPT + APPENDED
    state = sum(slot.bytes_per_token for slot in branch.slots)
    wide = [torch.promote_types(s.dtype, options.grad_dtype).itemsize if s.learns else 0 for s in branch.slots]
    grads = sum(size * s.heads * s.width for size, s in zip(wide, branch.slots, strict=True))
    carried = sum(carry.num_bytes for carry in branch.carries)
    passing = sum(
        carry.numbers * torch.promote_types(carry.dtype, options.grad_dtype).itemsize for carry in branch.carries
    )
    masks = _MASK_BYTES * len(branch.masks) * sympy.Min(SPAN + SILENT, MASK_TILE) ** 2
    found = {"masks": masks, "state": state * tokens, "boundary states": sympy.Integer(carried) * (SAVED + 2)}
    if unwound:
        found["state gradients"] = grads * tokens
        found["boundary states"] += 2 * passing
    numbers = [s.heads * s.width * (s.dtype.itemsize + w) for s, w in zip(branch.slots, wide, strict=True)]
    parts = 2 * _STAGED_PARTS * max(numbers, default=0) * sympy.Min(KEY_TILE, PROMPT)  # keys and values
    return found, {"masks": masks, "staging": parts + 2 * (carried + passing)}


def _gradient_bytes(trained: Sequence[fx.Node], values: Mapping[fx.Node, Any], options: Options) -> sympy.Integer:
    """Return what the gradients of parameters take: their sums, and the largest one before it is added to its sum."""
    sums, passing = 0, 0
    for node in trained:
        value = values[node]
        wide = torch.promote_types(value.dtype, options.grad_dtype)
        sums += value.numel() * wide.itemsize
        passing = max(passing, value.numel() * value.element_size() if wide != value.dtype else 0)
    return sympy.Integer(sums + passing)


def _at(samples: Mapping[int, Footprint], what: str, tokens: sympy.Symbol) -> sympy.Expr:
    """Return a figure of the footprints as a function of the tokens that run: zero for none, linear between samples."""
    points = [(0, 0), *((n, getattr(footprint, what)) for n, footprint in sorted(samples.items()))]
    pieces = []
    for (n0, y0), (n1, y1) in itertools.pairwise(points):
        line = y0 + sympy.Rational(y1 - y0, n1 - n0) * (tokens - n0)
        pieces.append((line, sympy.true if n1 == points[-1][0] else tokens <= n1))
    return sympy.Piecewise(*pieces)

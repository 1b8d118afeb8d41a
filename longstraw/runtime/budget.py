"""Chooses a plan that fits a memory budget: of those that the law lets through, the one that computes and moves least.

The work of a plan is counted in passes of one token through the model: what is computed twice, a fixed cost for every
span, and what comes from another tier. It orders plans; it is not a prediction of time.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor

from longstraw import compat
from longstraw.errors import BudgetTooSmall
from longstraw.runtime import memory_law as law
from longstraw.runtime.memory_law import MemoryLaw, bytes_of, evaluated, memory_law, sampled
from longstraw.runtime.plan import Plan, Shape
from longstraw.stages import Lowered

MIB = 1 << 20
_SHORTEST_SPAN = 16
_SPAN_COST = 32
"""What starting a span costs, in tokens."""
_MOVED_KEYS = 256
"""From another tier a token's state costs as much as attention of so many queries to it."""


@dataclass(frozen=True)
class Estimate:
    """A plan with what it takes.

    Attributes:
        plans: one for each branch.
        peak: bytes at once, at most; of live tensors on the device, weights and other inputs among them.
        parts: what they are made of, by name, at the branch and the phase of the peak.
        work: passes of a token through the model.
    """

    plans: tuple[Plan, ...]
    peak: int
    parts: Mapping[str, int]
    work: float

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """Return the estimate as text."""
        parts = ", ".join(f"{name} {size / MIB:,.1f}" for name, size in self.parts.items() if size)
        return [self.plans[0].describe(), f"peak {self.peak / MIB:,.1f} MiB: {parts}"]


class Budget:
    """Plans the steps of one compiled program.

    Args:
        program: the program.
    """

    def __init__(self, program: Lowered) -> None:
        self._program = program
        self._options = program.step.partitioned.step.options
        self._laws: dict[object, MemoryLaw] = {}
        self._longest = sys.maxsize
        self._chosen: dict[object, Estimate] = {}

    def law(self, inputs: Sequence[Any], shape: Shape | None = None) -> MemoryLaw:
        """Return the program's memory law.

        Args:
            inputs: of the step, whose sizes bound the spans that are rehearsed.
            shape: of their rows; a law that was found with as many sizes holds for them too.
        """
        inputs_size = round(4 * math.log2(1 + bytes_of(inputs)))  # gradients of inputs that grow with the rows
        key = (torch.is_grad_enabled(), inputs_size, None if shape is None else sampled(shape))
        if key not in self._laws:
            with compat.without_modes():  # a caller's mode doesn't see what isn't run
                self._laws[key] = memory_law(self._program, inputs)
        return self._laws[key]

    def default(self) -> tuple[Plan, ...]:
        """Return the plans without a budget."""
        plans = (Plan.of(branch, self._options) for branch in self._program.step.branches)
        return tuple(replace(plan, span_tokens=min(plan.span_tokens, self._longest)) for plan in plans)

    def shorten(self, tokens: int) -> None:
        """Plan no span of more tokens from here on."""
        self._longest = min(self._longest, tokens)
        self._chosen.clear()

    def estimate(self, plans: Sequence[Plan], shape: Shape, inputs: Sequence[Any]) -> Estimate:
        """Return what plans take.

        Args:
            plans: one for each branch.
            shape: of the step's rows.
            inputs: of the step.
        """
        given = {"weights and inputs": bytes_of(inputs), "earlier gradients": bytes_of(_earlier_gradients(inputs))}
        trained = self._options.prompt_grad == "exact" and torch.is_grad_enabled()
        return _estimate(self.law(inputs, shape), tuple(plans), shape, given, trained=trained)

    def choose(self, budget: int, shape: Shape, inputs: Sequence[Any], *, has_host: bool) -> Estimate:
        """Return the plans that fit the budget and work least.

        Args:
            budget: in bytes.
            shape: of the step's rows.
            inputs: of the step.
            has_host: whether host memory is another than the device's.

        Raises:
            BudgetTooSmall: none fits.
        """
        given = bytes_of(inputs), bytes_of(_earlier_gradients(inputs))
        key = (budget, shape, has_host, torch.is_grad_enabled(), given)
        if key not in self._chosen:
            found = [self.estimate(plans, shape, inputs) for plans in self._candidates(shape, has_host)]
            fitting = [estimate for estimate in found if estimate.peak <= budget]
            if not fitting:
                raise _too_small(budget, min(found, key=lambda estimate: estimate.peak), shape)
            self._chosen[key] = min(fitting, key=lambda estimate: (estimate.work, estimate.peak))
        return self._chosen[key]

    def _candidates(self, shape: Shape, has_host: bool) -> Iterator[tuple[Plan, ...]]:
        defaults, options = self.default(), self._options
        longest = max(plan.span_tokens for plan in defaults)
        spans = [longest] if options.span_tokens != "auto" else _halved(longest, _SHORTEST_SPAN)
        tiers = ["device", "host"] if has_host and options.state_tier == "device" else [options.state_tier]
        batches = [None, 1] if options.replay_rows == "auto" else [options.replay_rows]
        for span in spans:
            for every, tier, rows in itertools.product(self._thinnings(span, shape), tiers, batches):
                changed: dict[str, Any] = {"saved_every": every, "tier": tier, "replay_rows": rows}
                yield tuple(replace(p, span_tokens=min(p.span_tokens, span), **changed) for p in defaults)

    def _thinnings(self, span: int, shape: Shape) -> list[int | None]:
        """Return every how many-th boundary state may be saved."""
        if self._options.boundary_every != "auto" or not any(p.boundary_bytes for p in self.default()):
            return [self.default()[0].saved_every]
        best = max(1, round(math.sqrt(shape.shared / span)))
        return list(_halved(best, 1))


def _earlier_gradients(inputs: Sequence[Any]) -> list[Tensor]:
    """Return the gradients that are there before the step, to which it adds its own."""
    leaves = [x for x in inputs if isinstance(x, Tensor) and x.is_leaf]
    return [x.grad for x in leaves if x.grad is not None]


def _halved(largest: int, least: int) -> list[int]:
    found = [largest]
    while found[-1] // 2 >= least:
        found.append(found[-1] // 2)
    return found


def _estimate(
    memory: MemoryLaw, plans: tuple[Plan, ...], shape: Shape, given: Mapping[str, int], *, trained: bool
) -> Estimate:
    computed = evaluated(memory.computed, _numbers(plans[0], shape))
    numbers = [_numbers(plan, shape) for plan in plans]
    kept = [
        {name: evaluated(formula, n) for name, formula in (b.kept if p.tier == "device" else b.staged).items()}
        for b, p, n in zip(memory.branches, plans, numbers, strict=True)
    ]
    waiting = [
        evaluated(b.graphs, n) + sum(k.values()) if b.waits else 0
        for b, k, n in zip(memory.branches, kept, numbers, strict=True)
    ]
    peaks: list[tuple[int, dict[str, int]]] = []
    for i, branch in enumerate(memory.branches):
        others = sum(waiting) - waiting[i]
        for name, formula in branch.phases.items():
            phase = {**given, "computed inputs": computed, **kept[i], "other branches": others}
            phase[name] = evaluated(formula, numbers[i])
            peaks.append((sum(phase.values()), phase))
    peak, parts = max(peaks, key=lambda found: found[0])
    return Estimate(plans, peak, parts, sum(_work(plan, shape, trained=trained) for plan in plans))


def _numbers(plan: Plan, shape: Shape) -> dict[sympy.Symbol, Any]:
    """Return what the law's symbols are worth."""
    leaf = shape.response
    rows = min(plan.batch(leaf), shape.rows) if leaf else 0
    batch = rows * leaf
    recorded = plan.response_tokens // batch * batch if leaf else 0
    cuts = plan.cut(0, shape.shared if shape.whole else shape.prompt, has_tail=not shape.whole)
    every = plan.boundary_every(len(cuts), 1) if plan.boundary_bytes else 1
    saved = min(len(cuts), -(-len(cuts) // every) + (every if every > 1 else 0))
    last = cuts[-1][1] - cuts[-1][0] if cuts else 0
    silent = max(0, leaf - shape.results)
    return {
        law.PROMPT: shape.shared,
        law.RESPONSE: leaf,
        law.ROWS: shape.rows,
        law.SPAN: max((hi - lo for lo, hi in cuts), default=0),
        law.TAIL: 0 if shape.whole else min(plan.tail_tokens, shape.prompt),
        law.SILENT: last - min(shape.scored, last) if shape.whole else rows * min(silent, plan.span_tokens),
        law.RECORDED: min(shape.scored, last) if shape.whole else min(recorded, shape.rows * leaf),
        law.REPLAYED: max(rows * min(leaf - silent, plan.span_tokens), min(shape.scored, plan.span_tokens)),
        law.APPENDED: rows * (leaf - 1 - (leaf - 1) % plan.span_tokens) if leaf else 0,
        law.SAVED: saved,
        law.KEPT: shape.kept,
    }


def _work(plan: Plan, shape: Shape, *, trained: bool) -> float:
    """Return what a plan makes a branch do, in passes of a token."""
    spans = len(plan.cut(0, shape.shared, has_tail=True))
    every = plan.boundary_every(spans, 1) if plan.boundary_bytes else 1
    leaf = max(1, shape.response)
    runs = 3 if trained else 1  # capture, and unwind: forward again and backward
    batches = -(-shape.rows // plan.batch(leaf)) * -(-leaf // plan.span_tokens)
    tokens = (runs + trained) * shape.shared + _SPAN_COST * (runs * spans + 3 * batches)
    again = shape.shared if trained and every > 1 else 0
    moved = 0.0
    if plan.tier != "device":
        moved = _MOVED_KEYS / plan.span_tokens * (runs * shape.shared + 3 * batches * plan.span_tokens)
    return tokens + again + moved


def _too_small(budget: int, least: Estimate, shape: Shape) -> BudgetTooSmall:
    plan, parts = least.plans[0].describe(), least.lines()[1].split(": ", 1)[1]
    kept = "" if least.parts["earlier gradients"] else " Gradients that are kept from call to call come on top."
    return BudgetTooSmall(
        f"No plan for this step (a prompt of {shape.prompt} tokens and {shape.rows} rows, each with up to "
        f"{shape.response} tokens of its own) fits a memory budget of {budget:,} bytes. The smallest takes "
        f"{least.peak:,}. It has {plan}; its peak of {least.peak / MIB:,.1f} MiB consists of, in MiB: {parts}.",
        remedy=f"Give memory_budget={least.peak} (bytes) or more.{kept}",
    )

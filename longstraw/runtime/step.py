"""One step, top to bottom: capture, score, objective, replay, unwind, finalise.

`run_step` is what a compiled step calls. Capture and score run in its forward; the objective runs under autograd on
their results; replay, unwind and finalise run in the backward of `_Branch`, the one autograd node between parameters
and results. `_Held` is between the step and all that learns: it hands gradients over when everything has succeeded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from longstraw.errors import BackwardTwice, BadInput, DoubleBackward, ParametersChanged
from longstraw.runtime import needed
from longstraw.runtime.budget import Budget
from longstraw.runtime.numbers import Numbers
from longstraw.runtime.plan import Shape
from longstraw.runtime.reuse import PromptCache, outputs_and_drift
from longstraw.runtime.shorter import refused_if_full
from longstraw.runtime.transaction import BranchRun
from longstraw.runtime.versions import versions
from longstraw.stages import Located, Lowered, Partitioned


def run_step(program: Lowered, budget: Budget, *inputs: Any, caches: Sequence[PromptCache] | None = None) -> Any:
    """Run one step on its inputs; return its outputs, ready for backward.

    Args:
        program: the compiled step.
        budget: plans it.
        inputs: values of the traced graph's placeholders, in order.
        caches: for each branch, what keeps its captured prompt for later steps; None keeps none.
    """
    located = program.step.partitioned.step
    names = _placeholders(located)
    with refused_if_full():
        held = _held(located, dict(zip(names, inputs, strict=True)))
        connected = [held.get(node, value) for node, value in zip(names, inputs, strict=True)]
        branches = _branches(program, budget, inputs, connected, caches or [None] * len(program.step.branches))
    with contextlib.ExitStack() as stack:
        for cache in caches or ():
            stack.enter_context(cache.cleared_on_error())
        results = [_connected(run, held) for run in branches]
        objective = functools.partial(program.step.partitioned.objective, *connected)
        return outputs_and_drift(objective, results, [run.stale for run in branches], located.options)


def _placeholders(located: Located) -> list[fx.Node]:
    return [node for node in located.module.graph.nodes if node.op == "placeholder"]


def _held(located: Located, values: Mapping[fx.Node, Any]) -> dict[fx.Node, Tensor]:
    """Return what learns among the inputs, connected to autograd by one node for all of it."""
    learning = {n: x for n, x in values.items() if n in located.learns and isinstance(x, Tensor) and x.requires_grad}
    if not (learning and torch.is_grad_enabled()):
        return {}
    return dict(zip(learning, _Held.apply(*learning.values()), strict=True))  # type: ignore[no-untyped-call]


def _branches(
    program: Lowered,
    budget: Budget,
    inputs: Sequence[Any],
    connected: Sequence[Any],
    caches: Sequence[PromptCache | None],
) -> list[BranchRun]:
    """Return the branches of one step, with their plans.

    Args:
        program: the compiled step.
        budget: plans it.
        inputs: the step's.
        connected: the same, through `_Held`.
        caches: one for each branch.
    """
    located = program.step.partitioned.step
    values: dict[fx.Node, Any] = dict(zip(_placeholders(located), inputs, strict=True))
    _check_inputs(located, values)
    light = program.prologue(*connected)
    values.update(zip(program.light, light, strict=True))
    numbers = Numbers(located.sizes, values)
    branches = [
        BranchRun(branch, runs, values, numbers, located, shorten=budget.shorten, cache=cache)
        for branch, runs, cache in zip(program.step.branches, program.runs, caches, strict=True)
    ]
    _leave_out(program.step.partitioned, inputs, branches)
    for run, plan in zip(branches, budget.default(), strict=True):
        run.take(plan)
    if isinstance(located.options.memory_budget, int):
        _plan(budget, located.options.memory_budget, branches, inputs)
    return branches


def _check_inputs(located: Located, values: Mapping[fx.Node, Any]) -> None:
    devices: dict[torch.device, str] = {}
    for node, value in values.items():
        if not isinstance(value, Tensor):
            continue
        source = next(i.source for i in located.inputs if i.name == node.name)
        if value.ndim and value.numel() == 0:
            raise BadInput(
                f"{source} is empty: its shape is {tuple(value.shape)}.", remedy="Give it at least one entry."
            )
        if value.ndim:
            devices.setdefault(value.device, source)
    if len(devices) > 1:
        listed = ", ".join(f"{source} on {device}" for device, source in devices.items())
        raise BadInput(
            f"The step's tensors are on different devices: {listed}.",
            remedy="Move the model and its inputs to one device.",
        )


def _leave_out(step: Partitioned, inputs: Sequence[Any], branches: Sequence[BranchRun]) -> None:
    """Tell every branch which entries of its results are read, as far as that shows before the model has run."""
    if step.reads is None:
        return
    blanks = [run.empty_results() for run in branches]
    read = iter(needed.read(step.reads, inputs, [blank for results in blanks for blank in results]))
    for run, results in zip(branches, blanks, strict=True):
        run.leave_out(list(itertools.islice(read, len(results))))


def _plan(budget: Budget, most: int, branches: Sequence[BranchRun], inputs: Sequence[Any]) -> None:
    """Give every branch a plan that fits so many bytes, for the longest prompt and response among them."""
    shapes = [run.shape for run in branches]
    largest = Shape(*(max(getattr(shape, name.name) for shape in shapes) for name in dataclasses.fields(Shape)))
    chosen = budget.choose(most, largest, inputs, has_host=branches[0].device.type == "cuda")
    for run, plan in zip(branches, chosen.plans, strict=True):
        run.take(plan)


def _connected(run: BranchRun, held: Mapping[fx.Node, Tensor]) -> list[Tensor]:
    """Run capture and score; return the results, connected to autograd when they need a gradient."""
    inputs = [held.get(node, run.values[node]) for node in run.differentiable]
    if torch.is_grad_enabled() and inputs and run.learns:
        return list(_Branch.apply(run, *inputs))  # type: ignore[no-untyped-call]
    with torch.no_grad():
        return run.forward(keep=False)


class _Held(torch.autograd.Function):
    """Passes inputs on. Autograd calls its backward last in a step, so no gradient is written where anything fails."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(x.detach() for x in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads


class _Branch(torch.autograd.Function):
    """The one autograd node between a branch's parameters and its results."""

    @staticmethod
    def forward(ctx: Any, run: BranchRun, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.run = run
        ctx.versions = versions(run.branch, run.values, run.inputs)
        results = run.forward(keep=True)
        ctx.mark_non_differentiable(*(r for r in results if not r.is_floating_point()))
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        run: BranchRun | None = ctx.run
        if torch.is_grad_enabled():
            raise DoubleBackward(
                "A gradient of a gradient was asked for (create_graph=True): replay keeps no graph of the backward.",
                remedy="Use create_graph=False; penalties on gradients need eager.",
            )
        if run is None:
            raise BackwardTwice(
                "Backward ran a second time through a compiled step whose state was released after the first.",
                remedy="Call the step again, or add the losses before calling backward once.",
            )
        now = versions(run.branch, run.values, run.inputs)
        changed = [now[key][0] for key, before in ctx.versions.items() if now[key] != before]
        if changed:
            raise ParametersChanged(
                f"{changed[0]} was changed or replaced between the step's forward and its backward"
                f"{f', and {len(changed) - 1} more tensors' if len(changed) > 1 else ''}.",
                remedy="Run backward before optimizer.step() and before loading or averaging weights.",
            )
        ctx.run = None
        wanted = [node for node, needed in zip(run.differentiable, ctx.needs_input_grad[1:], strict=True) if needed]
        leaves = run.backward(grads)
        return (None, *(leaves.gradient(node) if node in wanted else None for node in run.differentiable))

"""explain: what a step was rewritten into, without running it."""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import fx

from longstraw import backend, compat
from longstraw.arch.rules import op_name
from longstraw.errors import BudgetTooSmall, LongstrawError
from longstraw.options import Options
from longstraw.parallel import held, refuse_parallel_models
from longstraw.passes.trace import may_have_model
from longstraw.render import render
from longstraw.runtime.budget import Budget, Estimate
from longstraw.runtime.memory_law import MemoryLaw
from longstraw.runtime.step import run_step
from longstraw.stages import Expansion, Lowered, Slot, Stateful

STAGES = ("trace", *(run.__name__ for run in backend.PASSES))


@dataclass(frozen=True)
class Explanation:
    """What `explain` found. `str()` gives one screen.

    Attributes:
        programs: the rewritten steps: one for each forward with a model (a loop over micro-batches has several).
        records: for each program, the record of every stage by name.
        inputs: of the first program, as fake tensors.
        broken: where Dynamo broke the step after these programs, and why; "" where it did not. What comes after, which
            may be another forward with a model, isn't shown.
    """

    programs: tuple[Lowered, ...]
    records: tuple[Mapping[str, Any], ...]
    inputs: tuple[Any, ...]
    broken: str = ""

    def stage(self, name: str, program: int = 0) -> str:
        """Return the graphs after a stage as Python source that runs.

        Args:
            name: one of `trace`, `normalise`, `find_branches`, `find_token_dim`, `partition`, `insert_state`, `lower`.
            program: which of the programs.

        Raises:
            ValueError: there is no such stage.
        """
        if name not in STAGES:
            raise ValueError(f"There is no stage {name!r}; the stages are {', '.join(STAGES)}.")
        return render(self.records[program][name])

    def law(self) -> MemoryLaw:
        """Return the memory law of the first program: what each part of the step takes, as sympy formulas.

        Spans of several sizes are run on fake tensors for it, which takes as long as so many forwards and backwards
        take without their computing.
        """
        return self._budget.law(self.inputs)

    def estimate(self, memory_budget: int | str | None = None) -> Estimate:
        """Return the plan of the first program and what it takes, for rows whose prompt ends where results begin.

        A step that runs knows more: which rows share what, and which tokens sliding windows hide; it may take less.

        Args:
            memory_budget: as in the options, in place of what they say.

        Raises:
            BudgetTooSmall: no plan fits the budget.
        """
        budget, shape = self._budget, self.law().shape
        options = self._options if memory_budget is None else Options(memory_budget=memory_budget)
        bound = options.memory_budget
        if not isinstance(bound, int):
            return budget.estimate(budget.default(), shape, self.inputs)
        return budget.choose(bound, shape, self.inputs, has_host=_has_host(self.inputs))

    @functools.cached_property
    def _budget(self) -> Budget:
        return Budget(self.programs[0])

    @property
    def _options(self) -> Options:
        return self.programs[0].step.partitioned.step.options

    def __str__(self) -> str:
        described = [*(_describe(program) for program in self.programs), "\n".join(self._plan())]
        return "\n\n".join([*described, f"not shown: what runs after {self.broken}"] if self.broken else described)

    def _plan(self) -> list[str]:
        if self._options.memory_budget is None:
            return [f"plan: {self._budget.default()[0].describe()}"]
        try:
            first, second = self.estimate().lines()
        except BudgetTooSmall as error:
            return [f"plan: {error}"]
        return [f"plan: {first}", f"      {second}"]


def explain(
    step: Callable[..., Any], *args: Any, options: Options | Mapping[str, Any] | None = None, **kwargs: Any
) -> Explanation:
    """Rewrite a step for these arguments and show the result; the step's graph is not run.

    It ends at the first graph with a model. If Dynamo breaks the step after that one, later forwards aren't shown, and
    the text says so.

    Args:
        step: the step, or what `torch.compile` returned for it, whose options are not read.
        *args, **kwargs: its arguments; models and tensors may be on the meta device.
        options: as for `torch.compile(..., options=...)`.

    Raises:
        LongstrawError: the step can't be rewritten.
        ValueError: the step contains no model.
    """
    found = Recorder(Options.of(options), stop=True)
    step = getattr(step, "_torchdynamo_orig_callable", step)
    refuse_parallel_models([*compat.tree_leaves((args, kwargs)), *held(step)], replicated=False)
    torch._dynamo.reset()
    try:
        torch.compile(step, backend=found)(*args, **kwargs)
    except Exception as error:
        if not isinstance(_cause(error), _Captured):
            raise (_cause(error) if isinstance(_cause(error), LongstrawError) else error) from None
    finally:
        torch._dynamo.reset()
    if not found.programs:
        raise ValueError("The step contains no model: nothing was rewritten.")
    return Explanation(tuple(found.programs), tuple(found.records), found.inputs, found.broken)


def _has_host(inputs: Sequence[Any]) -> bool:
    """Return whether host memory is another than that of the step's device."""
    return any(x.device.type == "cuda" for x in inputs if isinstance(x, torch.Tensor))


def _cause(error: BaseException) -> BaseException:
    """Return the error that a backend raised, below Dynamo's wrapping."""
    inner = getattr(error, "inner_exception", None) or error.__cause__
    return error if inner is None else _cause(inner)


class _Captured(Exception):
    """Ends the call once the step is rewritten."""


class Recorder:
    """The backend, keeping the record of every stage.

    Args:
        options: the user's options.
        stop: end the call at the first graph with a model, before anything runs.
    """

    def __init__(self, options: Options, *, stop: bool = False) -> None:
        self.options, self.stop = options, stop
        self.programs: list[Lowered] = []
        self.records: list[dict[str, Any]] = []
        self._stages: dict[str, Any] = {}
        self.inputs: tuple[Any, ...] = ()
        self.broken = ""
        self.__name__ = "longstraw"
        compat.trace_backward_inside(self, backend.traced_as_others)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if not may_have_model(gm):
            return gm.forward if self.stop else backend.inner(self.options)(gm, example_inputs)
        if not self.stop:
            return backend.raised_when_called(lambda: self._compile(gm, run_step))
        return self._compile(gm, self._end)

    def _compile(self, gm: fx.GraphModule, start: Callable[..., Any]) -> Callable[..., Any]:
        reason = compat.graph_break(gm)
        if reason is not None:
            self.broken = f"Dynamo's graph break ({reason[0]})" + (f"\n  at {reason[1]}" if reason[1] else "")
        return backend.compile_graph(gm, options=self.options, observe=self._observe, start=start)

    def _end(self, program: Lowered, budget: Budget, *inputs: Any, **_: Any) -> NoReturn:
        """Take the sizes of a step's inputs instead of running it."""
        mode = compat.new_fake_mode()
        self.inputs = tuple(compat.as_fake(mode, x) if isinstance(x, torch.Tensor) else x for x in inputs)
        raise _Captured

    def _observe(self, name: str, record: Any) -> None:
        if name == STAGES[0]:
            self._stages = {}
        self._stages[name] = record
        if isinstance(record, Lowered):
            self.programs.append(record)
            self.records.append(self._stages)


# --- the summary ------------------------------------------------------------------------------------------------------


def _describe(program: Lowered) -> str:
    located = program.step.partitioned.step
    options = located.options
    lines = [
        f"longstraw: {len(program.step.branches)} branch{'es' if len(program.step.branches) != 1 else ''}, "
        f"rows = {located.sizes.rows_expr}, tokens per row = {located.sizes.tokens_expr}, "
        f"prompt_grad = {options.prompt_grad}{_reuse(options)}"
    ]
    for number, branch in enumerate(program.step.branches):
        passes = branch.segment.passes
        shared = f": one capture for {passes} passes that compute the same" if passes > 1 else ""
        lines += ["", f"branch {number}{shared}", *(f"  {line}" for line in _describe_branch(branch))]
    partitioned = program.step.partitioned
    masked = "" if partitioned.reads is None else "; rows end at the last token that it reads"
    lines += ["", f"objective: {_ops(partitioned.objective)}{masked}"]
    return "\n".join(lines)


def _reuse(options: Options) -> str:
    steps = options.reuse_prompt_for
    return f", prompt reused for {steps} step{'s' if steps > 1 else ''}" if steps else ""


def _describe_branch(branch: Stateful) -> list[str]:
    lines = []
    for i, node in enumerate(branch.segment.results):
        window = next(head.window for head in branch.segment.heads if i in head.results)
        lines.append(f"result {node.name} for tokens {window.start} to {window.stop}")
    total = sum(slot.bytes_per_token for slot in branch.slots)
    lines.append(
        f"state: {len(branch.slots)} slots of {len(branch.sites)} attentions, {total} bytes per token of a row"
    )
    if branch.carries:
        numbers, size = (sum(getattr(c, k) for c in branch.carries) for k in ("numbers", "num_bytes"))
        lines.append(f"boundary state of {len(branch.carries)} scans: {numbers} numbers, {size} bytes for a row")
    lines += [f"  {line}" for line in state_table(branch)]
    for name in ("capture", "score"):
        lines.append(f"{name}: {_ops(getattr(branch, name))}")
    for head in branch.segment.heads:
        lines.append(f"head: {_ops(head.graph.module)}; about {head.bytes_per_token} bytes per token, run in tiles")
    return lines


def state_table(branch: Stateful) -> list[str]:
    """Return which module keeps which state, modules that differ in their number only in one line."""
    rows: dict[tuple[str, str], list[str]] = {}
    for i, site in enumerate(branch.sites):
        key, value = branch.slots[site.key_slot], branch.slots[site.value_slot]
        shared = any(site.key_slot == other.key_slot for other in branch.sites[:i])
        mask = "causal" if site.causal else f"mask {', '.join(map(str, site.masks))}"
        mask += "" if site.chooser is None else f", {branch.choosers[site.chooser].k} selected keys"
        what = f"{key.heads} x {key.width} keys, {value.heads} x {value.width} values, {str(key.dtype)[6:]}"
        size = key.bytes_per_token + value.bytes_per_token
        if site.expansion is not None:
            what, size = _latents(site.expansion, site.heads, key), key.bytes_per_token
        size = 0 if shared else size
        what = "the state of an earlier attention" if shared else what
        _add(rows, site.module or "attention", f"{size:>9} B/token  {what}, {mask}", i)
    for i, carry in enumerate(branch.carries):
        shape = " x ".join(map(str, carry.shape))
        what = f"{shape} = {carry.numbers} numbers of {carry.kind}, {str(carry.dtype)[6:]}"
        _add(rows, carry.module or "scan", f"{carry.num_bytes:>9} B        {what}", i)
    for i, chooser in enumerate(branch.choosers):
        slots = [branch.slots[slot] for slot in chooser.key_slots]
        size = sum(slot.bytes_per_token for slot in slots)
        shown = ", ".join(f"{slot.heads} x {slot.width}" for slot in slots)
        readers = sum(site.chooser == i for site in branch.sites)
        what = f"{shown} keys of a selection, {str(slots[0].dtype)[6:]}: {chooser.k} keys for {readers} attention"
        _add(rows, chooser.module or "selection", f"{size:>9} B/token  {what}{'s' if readers != 1 else ''}", i)
    names = {key: key[0].replace("*", _listed(numbers)) for key, numbers in rows.items()}
    width = max(map(len, names.values()), default=0)
    return [f"{names[key]:<{width}} {key[1]}" for key in rows]


def _latents(expansion: Expansion, heads: int, slot: Slot) -> str:
    """Say what is built from latents, and when queries are taken to them instead."""
    below = expansion.absorbed_below(heads, slot.width)
    form = f"absorbed below {below} queries" if expansion.linear else "not linear: always built"
    return (
        f"{slot.width} latents, {str(slot.dtype)[6:]}, for {expansion.key_heads} x {expansion.key_width} keys and "
        f"{expansion.value_heads} x {expansion.value_width} values ({form})"
    )


def _add(rows: dict[tuple[str, str], list[str]], module: str, text: str, index: int) -> None:
    """Add a module under its path without its last number, or the `index`-th of those whose path is not known."""
    numbers = re.findall(r"\d+", module)
    name = re.sub(r"\d+(?!.*\d)", "*", module) if numbers else f"{module} *"
    rows.setdefault((name, text), []).append(numbers[-1] if numbers else str(index))


def _listed(numbers: list[str], most: int = 4) -> str:
    """Return numbers as `3`, `{0-5}` for a run, or `{3, 7, ..., 63}`."""
    values = [int(n) for n in numbers]
    if len(values) == 1:
        return numbers[0]
    if values == list(range(values[0], values[-1] + 1)):
        return f"{{{values[0]}-{values[-1]}}}"
    shown = numbers if len(numbers) <= most else [*numbers[:3], "...", numbers[-1]]
    return f"{{{', '.join(shown)}}}"


def _ops(module: fx.GraphModule, most: int = 6) -> str:
    names = collections.Counter(op_name(n).rsplit(".", 1)[-1] for n in module.graph.nodes if n.op == "call_function")
    listed = ", ".join(f"{count} {name}" for name, count in names.most_common(most))
    return f"{sum(names.values())} ops ({listed}{', ...' if len(names) > most else ''})"

"""The compiler, top to bottom: what `torch.compile(step, backend="longstraw")` calls for every graph of a step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from longstraw import compat, invariants
from longstraw.arch import associative, installed_rules
from longstraw.arch.functions import opaque_functions
from longstraw.arch.same_sizes import Equality, SizesApart
from longstraw.errors import (
    SHORT_ROW,
    LongstrawError,
    MixesRows,
    MixesTokens,
    ModelSplit,
    StaticTokens,
    UnsupportedOp,
    WideResult,
)
from longstraw.options import Options
from longstraw.parallel import refuse_parallel, refuse_parallel_models
from longstraw.passes.find_branches import find_branches, has_region
from longstraw.passes.find_token_dim import Composite, find_token_dim
from longstraw.passes.insert_state import insert_state
from longstraw.passes.lower import lower
from longstraw.passes.normalise import normalise
from longstraw.passes.partition import partition
from longstraw.passes.split_at_backward import split_at_backward
from longstraw.passes.trace import hidden_inputs, may_have_model, returns_hidden, trace
from longstraw.passes.written_inputs import writing_back
from longstraw.render import render
from longstraw.runtime.budget import Budget
from longstraw.runtime.reuse import PromptCache
from longstraw.runtime.step import run_step
from longstraw.selfcheck import checked_at_first_call
from longstraw.stages import Lowered

Compiled = Callable[..., Any]
Observer = Callable[[str, Any], None]


def longstraw(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Options | Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Compiled:
    """Compile one graph of a step.

    Args:
        gm: the graph that Dynamo captured.
        example_inputs: its example inputs.
        options: an `Options` record or a mapping of option names.
        mode: accepted for torch.compile's sake; there are no modes.

    Returns:
        A function of the graph's inputs with the graph's outputs. For a step that is refused it raises the error when
        it is called, before anything has run: Dynamo would wrap an error raised here in one of its own.
    """
    return raised_when_called(lambda: _compile(gm, example_inputs, Options.of(options)))


def raised_when_called(compile_: Callable[[], Compiled]) -> Compiled:
    """Return what `compile_` returns, or a function that raises its refusal."""
    try:
        return compile_()
    except LongstrawError as error:
        return functools.partial(_refuse, error)


def _refuse(error: LongstrawError, *_: Any) -> Any:
    raise error.with_traceback(None)


def _compile(gm: fx.GraphModule, example_inputs: Sequence[Any], chosen: Options) -> Compiled:
    if not may_have_model(gm):
        hidden = hidden_inputs(gm)
        if hidden:
            refuse_parallel_models(compat.values_in_reach())
            raise ModelSplit(
                f"The model runs outside of the compiled graph: {hidden[0]} comes from code that Dynamo gave up on.",
                remedy="Compile the step that calls the model, and keep what Dynamo can't trace out of the model. "
                "torch.compile(step, fullgraph=True) and TORCH_LOGS=graph_breaks show the line.",
            )
        compat.retrace_as_usual(gm)
        associative.resolve(gm)
        return inner(chosen)(gm, example_inputs)
    try:
        return compile_graph(gm, options=chosen)
    except (WideResult, MixesRows, MixesTokens, UnsupportedOp, StaticTokens) as error:
        broken = compat.graph_break(gm)
        if broken is None or not returns_hidden(gm):
            raise
        raise ModelSplit(
            f"Dynamo broke the step inside the model, so only a piece of it can be seen: {broken[0]}. That piece "
            f"can't be run by itself: {error.what}",
            where=broken[1],
            remedy="The model must trace into one graph: keep Python control flow that depends on tensor values, numpy "
            "calls and prints out of it. torch.compile(step, fullgraph=True) and TORCH_LOGS=graph_breaks show more.",
        ) from error


def compile_graph(
    gm: fx.GraphModule, *, options: Options, observe: Observer | None = None, start: Compiled | None = None
) -> Compiled:
    """Return the compiled form of one Dynamo graph with symbolic sizes.

    Args:
        gm: Dynamo's graph.
        options: the user's options.
        observe: called with the name and the record of every stage.
        start: what is called in place of `run_step`.
    """

    associative.resolve(gm)
    compat.remember_model()

    def compile_piece(piece: fx.GraphModule) -> Compiled:
        try:
            program = build(piece, options=options, observe=observe)
        except StaticTokens as error:
            if error.tokens > SHORT_ROW or options.prompt_grad != "exact" or observe is not None:
                raise
            return piece.forward
        if program is None:
            return piece.forward
        floats = [isinstance(value, torch.SymFloat) for value in compat.fake_inputs(piece)]
        run: Compiled = functools.partial(start or run_step, program, Budget(program))
        if options.reuse_prompt_for:
            caches = [PromptCache(options.reuse_prompt_for) for _ in program.step.branches]
            run = functools.partial(run, caches=caches)
        if options.check == "numbers":
            run = checked_at_first_call(program, run)
        inputs = program.step.partitioned.step.inputs
        written = [(i, x.source) for i, x in enumerate(inputs) if x.written]
        run = writing_back(run, written) if written else run
        return functools.partial(_with_floats, run, floats) if any(floats) else run

    refuse_parallel(gm)
    try:
        return split_at_backward(gm, compile_piece=compile_piece)
    except LongstrawError as error:
        if isinstance(error, (StaticTokens, WideResult)):
            refuse_parallel_models(compat.values_in_reach())
        compat.retrace_with_constants(gm)  # where a number must be known, as a scale, one that changes costs a compile
        raise


def _with_floats(run: Compiled, floats: Sequence[bool], *inputs: Any) -> Any:
    """Run on Python floats in place of the tensors in which Dynamo hands over those that change."""
    return run(*(float(x) if is_float else x for x, is_float in zip(inputs, floats, strict=True)))


PASSES: tuple[Callable[[Any], Any], ...] = (
    normalise,
    find_branches,
    find_token_dim,
    partition,
    insert_state,
    lower,
)
"""The compiler's table of contents: what happens to a traced step, in order."""


def build(gm: fx.GraphModule, *, options: Options, observe: Observer | None = None) -> Lowered | None:
    """Trace one Dynamo graph and run every pass over it; return None when it has no tokens to run over.

    Composite ops that the model applies and no rule knows are traced as what they are made of. If that is no use, the
    refusal names the op that the user's line has. Where sizes of several inputs meet that are equal in this call, it is
    traced again under guards that they are.
    """
    written_out: frozenset[Any] = frozenset()
    guarded: set[Equality] = set()
    refused: dict[str, UnsupportedOp] = {}
    while True:
        try:
            return _build(gm, written_out, options, observe)
        except Composite as error:
            if error.ops <= written_out:
                raise
            written_out |= error.ops
            refused.setdefault(error.where, error.refusal)
        except SizesApart as error:
            if guarded.issuperset(error.equal):
                raise error.refusal from None
            for size, other in error.equal:
                compat.keep_equal(compat.fake_inputs(gm), size, other)
            guarded.update(error.equal)
        except Exception as error:
            instead = (
                refused.get(error.where) if isinstance(error, LongstrawError) else next(iter(refused.values()), None)
            )
            if instead is None:
                raise
            raise instead from error


def _build(
    gm: fx.GraphModule, written_out: frozenset[Any], options: Options, observe: Observer | None
) -> Lowered | None:
    step: Any = trace(gm, options=options, written_out=written_out)
    _finish("trace", step, options, observe)
    for run in PASSES:
        if run is find_branches and not has_region(step):
            return None
        step = run(step)
        _finish(run.__name__, step, options, observe)
    return step


def _finish(name: str, step: Any, options: Options, observe: Observer | None) -> None:
    if options.check != "off":
        invariants.check(step)
    compat.emit_artifact(f"longstraw_{name}", lambda: render(step))
    if observe is not None:
        observe(name, step)


def inner(options: Options) -> Compiled:
    """Return the backend for graphs without a model region."""
    return (
        compat.lookup_backend(options.inner_backend)
        if isinstance(options.inner_backend, str)
        else options.inner_backend
    )


def traced_as_others(options: Options | Mapping[str, Any] | None) -> list[compat.Substitution]:
    """Return the functions that are traced as another: known ones, and those of `rules`."""
    try:
        rules = Options.of(options).rules
    except LongstrawError:  # the backend raises it once the step is called
        rules = ()
    return opaque_functions((*installed_rules(), *rules))


compat.trace_backward_inside(longstraw, traced_as_others)

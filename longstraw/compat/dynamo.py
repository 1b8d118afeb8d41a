"""How Dynamo traces for this backend: every size a symbol, some functions as others, backward inside."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch._dynamo
import torch.fx.experimental._config as fx_config
from torch import fx
from torch._dynamo import trace_rules
from torch._dynamo.callback import CallbackArgs, callback_handler
from torch._dynamo.exc import TensorifyScalarRestartAnalysis, UnspecializeRestartAnalysis
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.variables import PolyfilledFunctionVariable
from torch._dynamo.variables.builder import VariableBuilder

from longstraw.compat.frames import backend_being_compiled_for, refuse_at_the_limit, refuse_under_modes

Backend = TypeVar("Backend", bound=Callable[..., Any])


_LOGS = ("debug", "info", "info_once", "warning", "warning_advice", "warning_once", "error")


class _Retrace(TensorifyScalarRestartAnalysis, UnspecializeRestartAnalysis):
    """Asks Dynamo to trace the frame again; the second base makes it forget the graph breaks of the first try."""


class _Tracing:
    """The Dynamo settings that hold while a frame is compiled for a backend of ours, and only then.

    Sizes are symbolic from the start: most frames with a model would have to be traced again otherwise. A frame without
    a model is traced again as Dynamo would have done.
    """

    def __init__(self) -> None:
        self._installed = False
        self._stack: contextlib.ExitStack | None = None
        self._symbolic: contextlib.ExitStack | None = None

    def install(self) -> None:
        """Watch Dynamo's compilations, once.

        Registered callbacks would be lost at `torch._dynamo.reset()`, so the handler's two methods are wrapped instead.
        """
        if not self._installed:
            self._installed = True
            start, end = callback_handler.run_start_callbacks, callback_handler.run_end_callbacks

            def run_start(args: CallbackArgs) -> None:
                self._start()
                start(args)

            def run_end(args: CallbackArgs) -> None:
                self._stop()
                end(args)

            callback_handler.run_start_callbacks = run_start  # type: ignore[method-assign]
            callback_handler.run_end_callbacks = run_end  # type: ignore[method-assign]
            refuse_at_the_limit()
            refuse_under_modes()

    def _start(self) -> None:
        backend, options = backend_being_compiled_for()
        if getattr(backend, "traces_backward", False):
            self._stack = contextlib.ExitStack()
            self._stack.enter_context(_substituted(backend.opaque_functions(options)))  # type: ignore[union-attr]
            # Without it Dynamo gives up a whole frame when `backward()` stands in a loop, before any backend is asked.
            self._stack.enter_context(torch._dynamo.config.patch(trace_autograd_ops=True))
            self._symbolic = self._stack.enter_context(_symbolic_sizes())
            # A log line in a model's forward would break its graph.
            ignored = {function for name, function in vars(logging.Logger).items() if name in _LOGS}
            ignored |= torch._dynamo.config.ignore_logging_functions
            self._stack.enter_context(torch._dynamo.config.patch(ignore_logging_functions=ignored))

    def _stop(self) -> None:
        if self._stack is not None:
            self._stack.close()
        self._stack = self._symbolic = None

    def make_static(self) -> bool:
        """Go back to the sizes that Dynamo would choose by itself; return whether that changes anything."""
        if self._symbolic is None:
            return False
        self._symbolic.close()
        self._symbolic = None
        return True

    def make_floats_constant(self) -> bool:
        """Take every Python float for a constant; return whether that changes anything."""
        if self._symbolic is None:
            return False
        self._symbolic.enter_context(torch._dynamo.config.patch(specialize_float=True))
        return True


@dataclass(frozen=True)
class Substitution:
    """A function that is traced as another.

    Attributes:
        owner: the module or class that holds it.
        name: its name there.
        function: the function itself.
        traceable: what is traced instead.
    """

    owner: Any
    name: str
    function: Callable[..., Any]
    traceable: Callable[..., Any]


@contextlib.contextmanager
def _substituted(substitutions: Sequence[Substitution]) -> Iterator[None]:
    """Let Dynamo trace other functions in place of some, and forget it afterwards.

    A function is found by identity, whatever name it goes by, unless somebody else's substitution stands for it
    already. A method is looked up in its class instead.
    """
    known_already = PolyfilledFunctionVariable._get_polyfill_handlers()
    functions = [s for s in substitutions if not isinstance(s.owner, type) and s.function not in known_already]
    methods = [s for s in substitutions if isinstance(s.owner, type)]
    tables: tuple[Any, ...] = (
        VariableBuilder._id_dispatch(),
        trace_rules._polyfilled_function_ids(),
        trace_rules.get_torch_obj_rule_map(),
        PolyfilledFunctionVariable._get_polyfill_handlers(),
    )
    before = [set(table) for table in tables] if functions else []
    wrappers = []  # Dynamo keeps them by identity: they must live as long
    try:
        for s in functions:
            replace = torch.compiler.substitute_in_graph(s.function, skip_signature_check=True)
            wrappers.append(replace(s.traceable))
        for s in methods:
            setattr(s.owner, s.name, s.traceable)
        yield
    finally:
        for s in methods:
            setattr(s.owner, s.name, s.function)
        for table, known in zip(tables, before, strict=False):
            for key in set(table) - known:
                table.remove(key) if isinstance(table, set) else table.pop(key)


@contextlib.contextmanager
def _symbolic_sizes() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            torch._dynamo.config.patch(
                assume_static_by_default=False,  # every size and int argument is symbolic
                automatic_dynamic_shapes=True,
                specialize_float=False,
            )
        )
        stack.enter_context(_floats_that_change_only())
        stack.enter_context(_leaves_inside())
        # Equal sizes must not share a symbol: P may equal R in the first call only.
        stack.enter_context(fx_config.patch(use_duck_shape=False))  # type: ignore[attr-defined]
        yield stack


@contextlib.contextmanager
def _floats_that_change_only() -> Iterator[None]:
    """Make a Python float symbolic when it differs from the last call's; until then it stays a plain number."""
    wrap = VariableBuilder.wrap_symfloat

    def wrap_one(self: VariableBuilder, value: float) -> Any:
        with torch._dynamo.config.patch(assume_static_by_default=True):
            return wrap(self, value)

    VariableBuilder.wrap_symfloat = wrap_one  # type: ignore[method-assign]
    try:
        yield
    finally:
        VariableBuilder.wrap_symfloat = wrap  # type: ignore[method-assign]


@contextlib.contextmanager
def _leaves_inside() -> Iterator[None]:
    """Let results depend on values inside the frame that had `requires_grad_()` called on them.

    Dynamo ends the graph there for the sake of AOTAutograd, which loses the call.
    """
    check = getattr(OutputGraph, _LEAF_CHECK, None)
    if check is None:  # this release of Dynamo always ends the graph there
        yield
        return
    setattr(OutputGraph, _LEAF_CHECK, lambda self, results, tx: None)
    try:
        yield
    finally:
        setattr(OutputGraph, _LEAF_CHECK, check)


_LEAF_CHECK = "_check_requires_grad_intermediate_outputs"


allow_leaf_inside = torch._C._functorch.set_inplace_requires_grad_allowed
"""What Dynamo writes before and after `requires_grad_()` on a value inside the graph."""


_tracing = _Tracing()


def trace_backward_inside(
    backend: Backend, opaque_functions: Callable[[Any], Sequence[Substitution]] = lambda options: ()
) -> Backend:
    """Let steps that call `backward()` be traced whole when they are compiled for `backend`; return it.

    Args:
        backend: the backend.
        opaque_functions: `options -> functions that are traced as another`.
    """
    backend.traces_backward = True  # type: ignore[attr-defined]
    backend.opaque_functions = opaque_functions  # type: ignore[attr-defined]
    _tracing.install()
    return backend


def retrace_as_usual(gm: fx.GraphModule) -> None:
    """Make Dynamo trace a frame again with the sizes it would choose by itself (raises), if that can differ."""
    symbolic = any(isinstance(node.meta.get("example_value"), _SYMBOLIC) for node in gm.graph.nodes)
    leaves = any(node.target is allow_leaf_inside for node in gm.graph.nodes)
    if (symbolic or leaves) and _tracing.make_static():
        raise _Retrace(restart_reason="longstraw leaves this graph to the inner backend")


_SYMBOLIC = (torch.SymInt, torch.SymFloat)


def retrace_with_constants(gm: fx.GraphModule) -> None:
    """Make Dynamo trace a frame again with every Python float a constant (raises), if any in its graph is none."""
    changing = any(isinstance(node.meta.get("example_value"), torch.SymFloat) for node in gm.graph.nodes)
    if changing and _tracing.make_floats_constant():
        raise _Retrace(restart_reason="longstraw needs a Python float as a constant")


def fake_inputs(gm: fx.GraphModule) -> list[Any]:
    """Return the example values (fake tensors, SymInts, SymFloats) of a Dynamo graph's placeholders.

    Dynamo hands over a Python float that changes from call to call as a tensor, and calls its `item()`.
    """
    floats = {
        node.args[0]: node.meta["example_value"]
        for node in gm.graph.find_nodes(op="call_method", target="item")
        if isinstance(node.meta.get("example_value"), torch.SymFloat)
    }
    return [floats.get(n, n.meta["example_value"]) for n in gm.graph.nodes if n.op == "placeholder"]


def graph_break(gm: fx.GraphModule) -> tuple[str, str] | None:
    """Return why and on which line of the user's Dynamo ended this graph early, or None when it is the whole frame."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    inside = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)) + os.sep)
    frames = [frame for frame in reason.user_stack or () if not frame.filename.startswith(inside)]
    frame = frames[-1] if frames else None
    line = f"{frame.filename}:{frame.lineno} in {frame.name}: {(frame.line or '').strip()}" if frame is not None else ""
    return reason.reason.splitlines()[0], line


def lookup_backend(name: str) -> Callable[..., Any]:
    """Return another torch.compile backend by name."""
    return cast(Callable[..., Any], torch._dynamo.lookup_backend(name))

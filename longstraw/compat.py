"""Private PyTorch APIs, each behind one function. Nothing else in the package imports private modules of torch.

Covered releases: 2.11 to 2.14. Each function has a test of its own, so that a release that changes one is seen at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, TypeVar, cast

import sympy
import torch
import torch._dynamo
import torch.fx.experimental._config as fx_config
from torch import fx
from torch._dynamo import convert_frame, trace_rules
from torch._dynamo.callback import CallbackArgs, callback_handler
from torch._dynamo.exc import TensorifyScalarRestartAnalysis, UnspecializeRestartAnalysis
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.variables import PolyfilledFunctionVariable
from torch._dynamo.variables.builder import VariableBuilder
from torch._guards import TracingContext, tracing
from torch._higher_order_ops.associative_scan import generic_associative_scan
from torch._logging._internal import trace_structured
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from longstraw.errors import CompiledTooOften, function_line

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
            _refuse_at_the_limit()

    def _start(self) -> None:
        backend, options = _backend_being_compiled_for()
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


def _refuse_at_the_limit() -> None:
    """Raise where Dynamo has compiled a frame for a backend of ours as often as it may, and would run it eagerly.

    That holds for frames that ran a model, themselves or in what they call; metrics may be computed eagerly.
    """
    exceeds = convert_frame.exceeds_recompile_limit  # type: ignore[attr-defined]

    def checked(*args: Any, **kwargs: Any) -> tuple[bool, str]:
        exceeded, limit = exceeds(*args, **kwargs)
        compiling = _compiling()
        if exceeded and compiling is not None and _place(compiling["code"]) in _frames_with_model:
            backend, _ = _backend_being_compiled_for()
            if getattr(backend, "traces_backward", False):
                code = compiling["code"]
                raise CompiledTooOften(
                    code.co_name,
                    times=int(getattr(torch._dynamo.config, limit)),
                    limit=limit,
                    reason=_failed_guard(str(compiling.get("recompile_reason") or "")),
                    where=function_line(code.co_filename, code.co_firstlineno, code.co_name),
                )
        return exceeded, limit

    convert_frame.exceeds_recompile_limit = checked  # type: ignore[attr-defined]


def _failed_guard(reason: str) -> str:
    """Return what a guard asked, as the user would write it, without the number of the compilation."""
    first = next(iter(reason.strip().splitlines()), "")
    return users_expression(re.sub(r"^\d+/\d+: ", "", first).split("  # ")[0].strip())


_frames_with_model: set[tuple[str, str, int]] = set()


def _place(code: CodeType) -> tuple[str, str, int]:
    """Return what Dynamo's code for a function and the function's own have in common."""
    return code.co_filename, code.co_name, code.co_firstlineno


def _compiling() -> Mapping[str, Any] | None:
    """Return what Dynamo knows of the frame that is being compiled, found on the stack."""
    frame = sys._getframe()
    while frame is not None and not {"code", "compiler_fn", "compile_id"} <= frame.f_locals.keys():
        frame = frame.f_back  # type: ignore[assignment]
    return None if frame is None else dict(frame.f_locals)


def remember_model() -> None:
    """Note that the frame that is being compiled runs a model, and so do those that called it."""
    compiling = _compiling()
    if compiling is not None:
        _frames_with_model.add(_place(compiling["code"]))
        frame = sys._getframe()
        while frame is not None:
            _frames_with_model.add(_place(frame.f_code))
            frame = frame.f_back  # type: ignore[assignment]


def values_in_reach() -> list[Any]:
    """Return what the frame that is being compiled reads by name, what the part of it that ran before had, and the
    objects whose methods are running.
    """
    compiling = _compiling()
    if compiling is None:
        return []
    code: CodeType = compiling["code"]
    values = [*compiling["locals"].values(), *(compiling["globals"].get(name) for name in code.co_names)]
    frame = sys._getframe()
    while frame is not None:
        if (frame.f_code.co_filename, frame.f_code.co_firstlineno) == (code.co_filename, code.co_firstlineno):
            values += frame.f_locals.values()
        elif "self" in frame.f_locals:
            values.append(frame.f_locals["self"])
        frame = frame.f_back  # type: ignore[assignment]
    return values


def is_part_for_ddp() -> bool:
    """Return whether Dynamo compiles a part of a graph that it has cut for DistributedDataParallel."""
    frame = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != "torch._dynamo.backends.distributed":
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


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


def _backend_being_compiled_for() -> tuple[Callable[..., Any] | None, Any]:
    """Return the innermost backend function of the compilation in progress, found on the stack, and its options."""
    frame = sys._getframe()
    while frame is not None and "compiler_fn" not in frame.f_locals:
        frame = frame.f_back  # type: ignore[assignment]
    found = frame.f_locals["compiler_fn"] if frame is not None else None
    options = None
    while found is not None:
        keywords = getattr(found, "kwargs", None) or getattr(found, "keywords", None) or {}
        options = options or getattr(found, "options", None) or keywords.get("options")
        wrapped = [
            getattr(found, name)
            for name in ("_torchdynamo_orig_backend", "compiler_fn", "func")
            if hasattr(found, name)
        ]
        if not wrapped:
            break
        found = wrapped[0]
    return found, options


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
    inside = (os.path.dirname(torch.__file__), os.path.dirname(__file__) + os.sep)
    frames = [frame for frame in reason.user_stack or () if not frame.filename.startswith(inside)]
    frame = frames[-1] if frames else None
    line = f"{frame.filename}:{frame.lineno} in {frame.name}: {(frame.line or '').strip()}" if frame is not None else ""
    return reason.reason.splitlines()[0], line


def is_composite(op: Any) -> bool:
    """Return whether an ATen op is written in terms of others, for autograd, too."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return isinstance(op, torch._ops.OpOverload) and bool(op.has_kernel_for_dispatch_key(key))


def to_aten(run: Callable[..., Any], fakes: Sequence[Any], *, written_out: Collection[Any] = ()) -> fx.GraphModule:
    """Trace `run` over fake values to ATen before autograd and autocast: attention and grad-mode switches survive.

    Args:
        run: a function of tensors and sizes.
        fakes: what it is traced with.
        written_out: composite ops of which the graph has what they are made of.
    """
    made_of = {op: op.decompose for op in written_out}
    mode = next((fake.fake_mode for fake in fakes if hasattr(fake, "fake_mode")), None)
    with contextlib.ExitStack() as stack:
        if mode is not None:
            # Without a tracing context of its own, make_fx looks for a mode in views' bases and finds
            # Dynamo's next one.
            stack.enter_context(tracing(TracingContext(mode)))
            stack.enter_context(mode)
        stack.enter_context(fx.traceback.preserve_node_meta())
        return make_fx(run, made_of, tracing_mode="symbolic", pre_dispatch=True)(*fakes)


tree_leaves, tree_flatten, tree_unflatten = pytree.tree_leaves, pytree.tree_flatten, pytree.tree_unflatten


def fake_mode(value: Any) -> contextlib.AbstractContextManager[Any]:
    """Return the mode that the first fake tensor of a structure belongs to; one that does nothing without any."""
    modes = [leaf.fake_mode for leaf in pytree.tree_leaves(value) if hasattr(leaf, "fake_mode")]
    return modes[0] if modes else contextlib.nullcontext()


def new_fake_mode() -> Any:
    """Return a mode under which operators compute sizes and dtypes only; real tensors among them are taken for fake."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def as_fake(mode: Any, value: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor of a mode with a tensor's sizes, strides, dtype and device; a leaf where it learns."""
    with mode:
        fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return fake.requires_grad_(value.requires_grad)


def may_hold(condition: torch.Tensor) -> bool:
    """Return whether a condition of one number is true; a fake one may be."""
    return isinstance(condition, FakeTensor) or bool(condition)


def true_places(mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the indices of a mask's true entries, one tensor for each dim; of a fake one, as many as may be true."""
    if isinstance(mask, FakeTensor):
        return tuple(mask.new_empty(mask.numel(), dtype=torch.int64) for _ in range(mask.dim()))
    return mask.nonzero(as_tuple=True)


without_modes = _disable_current_modes
"""A context in which no dispatch mode sees operators."""
DispatchMode = TorchDispatchMode
"""A context that sees every operator."""
StorageReference = StorageWeakRef
"""Knows whether a storage is alive, and keeps no storage so."""
outside_of_fakes = unset_fake_temporarily
"""A context in which operators compute, also within a fake tensor mode."""


def shape_env(fakes: Sequence[Any]) -> ShapeEnv | None:
    """Return the environment that owns the symbols of the fake values."""
    for fake in fakes:
        if hasattr(fake, "fake_mode"):
            return cast("ShapeEnv | None", fake.fake_mode.shape_env)
    return None


def expression(size: int | torch.SymInt | sympy.Expr) -> sympy.Expr:
    """Return a size as a sympy expression, with the replacements that tracing has learned."""
    if isinstance(size, torch.SymInt):
        return cast(sympy.Expr, size.node.shape_env.simplify(size.node.expr))
    return sympy.sympify(size)


def known_number(number: torch.SymFloat) -> float | None:
    """Return the value of a symbolic float that tracing takes for a constant, with a guard; None where it varies."""
    known = number.node.shape_env.simplify(number.node.expr)
    return float(known) if known.is_number else None


def hint(size: int | torch.SymInt) -> int:
    """Return the value that a size had in the traced call."""
    if isinstance(size, torch.SymInt):
        return int(size.node.hint) if size.node.hint is not None else 1
    return int(size)


def keep_equal(fakes: Sequence[Any], size: sympy.Expr, other: sympy.Expr) -> None:
    """Guard on two sizes of the fake values being equal, which they are in the traced call."""
    env = shape_env(fakes)
    assert env is not None
    equal = sympy.Eq(size, other)
    env.evaluate_expr(equal)
    if env.simplify(size - other) != 0:  # a guard that follows from others is not solved for a symbol
        env._maybe_guard_rel(equal)


def symbol_values(fakes: Sequence[Any]) -> dict[sympy.Expr, int]:
    """Return what each shape symbol was in the traced call."""
    env = shape_env(fakes)
    known = getattr(env, "backed_var_to_val", None) or getattr(env, "var_to_val", None) or {}
    return {symbol: int(value) for symbol, value in known.items()}


def depends_on_data(size: int | torch.SymInt) -> bool:
    """Return whether a size was read from a tensor's values."""
    return isinstance(size, torch.SymInt) and bool(free_unbacked_symbols(size))


def source_name(placeholder: fx.Node) -> str:
    """Return the expression, as a user writes it, of the value that Dynamo lifted into this placeholder."""
    argument = placeholder.meta.get("grapharg")
    source = getattr(argument, "source", None)
    name = getattr(source, "name", None)
    if name is None:
        return placeholder.name
    return users_expression(str(name() if callable(name) else name))


def users_expression(written: str) -> str:
    """Return Dynamo's expression for a value of the user's, such as `L['model'].head`, as the user would write it."""
    written = re.sub(r"\b[LG]\['(\w+)'\]", r"\1", written)
    written = re.sub(r"\.__dict__\['(\w+)'\]", r".\1", written)
    return re.sub(r"\._(?:modules|parameters|buffers)\['(\w+)'\]", r".\1", written)


def lookup_backend(name: str) -> Callable[..., Any]:
    """Return another torch.compile backend by name."""
    return cast(Callable[..., Any], torch._dynamo.lookup_backend(name))


def emit_artifact(name: str, text: Callable[[], str]) -> None:
    """Hand a stage's text to TORCH_TRACE and TORCH_LOGS."""
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text)


@contextlib.contextmanager
def autocast_state(state: tuple[tuple[str, bool, torch.dtype], ...]) -> Iterator[None]:
    """Run with the autocast settings that `current_autocast` returned earlier."""
    with contextlib.ExitStack() as stack:
        for device, enabled, dtype in state:
            stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False))
        yield


def enter_autocast(device: str, enabled: bool, dtype: torch.dtype) -> torch.autocast:
    """Enter autocast from a graph; casts are not cached, for a span's graph dies with its backward."""
    context = torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False)
    context.__enter__()
    return context


def without_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which dtypes stay as they are, for a device type that may have no autocast."""
    if not torch.amp.is_autocast_available(device):
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)


def exit_autocast(context: torch.autocast) -> None:
    """Leave what `enter_autocast` entered."""
    context.__exit__(None, None, None)


def memory(value: torch.Tensor) -> int:
    """Return the identity of the memory that a tensor, real or fake, lies in."""
    return cast(int, value.untyped_storage()._cdata)


enter_inference_mode = torch.autograd.grad_mode._enter_inference_mode
exit_inference_mode = torch.autograd.grad_mode._exit_inference_mode
read_data = torch._C._autograd._get_data_attr  # type: ignore[attr-defined]
"""What `torch.inference_mode` and `tensor.data` are in a Dynamo graph."""


def current_autocast(device: str) -> tuple[tuple[str, bool, torch.dtype], ...]:
    """Return the autocast settings in force for a device type, for `autocast_state`; none where it has no autocast."""
    if not torch.amp.is_autocast_available(device):  # as on the meta device
        return ()
    return ((device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)),)


def associative_scan(
    combine: Callable[..., Sequence[torch.Tensor]],
    values: Sequence[torch.Tensor],
    extras: Sequence[torch.Tensor],
    *,
    dim: int,
) -> list[torch.Tensor]:
    """Scan values along a dim with `combine(*left, *right, *extras)`, which takes entries of that dim apart."""
    return list(generic_associative_scan(combine, list(values), dim=dim, additional_inputs=tuple(extras)))

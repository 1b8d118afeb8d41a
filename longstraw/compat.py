"""Private PyTorch APIs, each behind one function. Nothing else in the package imports private modules of torch.

Covered releases: 2.11 to 2.14. Each function has a test of its own, so that a release that changes one is seen at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import sympy
import torch
import torch._dynamo
import torch.fx.experimental._config as fx_config
from torch import fx
from torch._dynamo.callback import CallbackArgs, callback_handler
from torch._dynamo.exc import TensorifyScalarRestartAnalysis, UnspecializeRestartAnalysis
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv


class _Retrace(TensorifyScalarRestartAnalysis, UnspecializeRestartAnalysis):  # type: ignore[misc]
    """Asks Dynamo to trace the frame again; the second base makes it forget the graph breaks of the first try."""


class _Tracing:
    """The Dynamo settings that hold between the restart of a frame and the end of its compilation."""

    def __init__(self) -> None:
        self.stack: contextlib.ExitStack | None = None

    def start(self) -> None:
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(
            torch._dynamo.config.patch(
                assume_static_by_default=False,  # every size and int argument is symbolic
                automatic_dynamic_shapes=True,
                specialize_float=True,  # but Python floats stay plain numbers
                trace_autograd_ops=True,  # `backward()` inside the step becomes autograd.grad nodes
            )
        )
        # Equal sizes must not share a symbol: P may equal R in the first call only.
        self.stack.enter_context(fx_config.patch(use_duck_shape=False))  # type: ignore[attr-defined]
        callback_handler.register_end_callback(self.stop)

    def stop(self, _: CallbackArgs | None = None) -> None:
        if self.stack is not None:
            stack, self.stack = self.stack, None
            stack.close()
            callback_handler.remove_end_callback(self.stop)


_tracing = _Tracing()


def retrace_with_symbolic_sizes() -> None:
    """Return at once when Dynamo traced this frame with symbolic sizes; otherwise make it trace again (raises)."""
    if _tracing.stack is None:
        _tracing.start()
        raise _Retrace(restart_reason="longstraw needs symbolic sizes")


def fake_inputs(gm: fx.GraphModule) -> list[Any]:
    """Return the example values (fake tensors, SymInts) of a Dynamo graph's placeholders."""
    return [node.meta["example_value"] for node in gm.graph.nodes if node.op == "placeholder"]


def to_aten(run: Callable[..., Any], fakes: Sequence[Any]) -> fx.GraphModule:
    """Trace `run` over fake values to ATen before autograd and autocast: attention and grad-mode switches survive."""
    mode = next((fake.fake_mode for fake in fakes if hasattr(fake, "fake_mode")), contextlib.nullcontext())
    with mode, fx.traceback.preserve_node_meta():
        return cast(fx.GraphModule, make_fx(run, tracing_mode="symbolic", pre_dispatch=True)(*fakes))


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


def hint(size: int | torch.SymInt) -> int:
    """Return the value that a size had in the traced call."""
    if isinstance(size, torch.SymInt):
        return int(size.node.hint) if size.node.hint is not None else 1
    return int(size)


def source_name(placeholder: fx.Node) -> str:
    """Return the Python expression of the user's value that Dynamo lifted into this placeholder."""
    argument = placeholder.meta.get("grapharg")
    source = getattr(argument, "source", None)
    name = getattr(source, "name", None)
    return str(name() if callable(name) else name) if name is not None else placeholder.name


def lookup_backend(name: str) -> Callable[..., Any]:
    """Return another torch.compile backend by name."""
    return cast(Callable[..., Any], torch._dynamo.lookup_backend(name))


def emit_artifact(name: str, text: Callable[[], str]) -> None:
    """Hand a stage's text to TORCH_TRACE and TORCH_LOGS."""
    torch._logging.trace_structured(
        "artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text
    )


@contextlib.contextmanager
def autocast_state(state: tuple[tuple[str, bool, torch.dtype], ...]) -> Iterator[None]:
    """Run with the autocast settings that `current_autocast` returned earlier."""
    with contextlib.ExitStack() as stack:
        for device, enabled, dtype in state:
            stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
        yield


def current_autocast(device: str) -> tuple[tuple[str, bool, torch.dtype], ...]:
    """Return the autocast settings in force for a device type, for `autocast_state`."""
    return ((device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)),)

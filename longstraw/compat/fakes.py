"""Fake tensors, symbolic sizes, and the trace to ATen."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import sympy
import torch
import torch._dynamo
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


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
    found = contextlib.ExitStack()
    if modes:
        found.enter_context(enable_python_dispatcher())  # 2.11's own linear asks for sizes that are numbers
        found.enter_context(modes[0])
    return found


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


def memory(value: torch.Tensor) -> int:
    """Return the identity of the memory that a tensor, real or fake, lies in."""
    return cast(int, value.untyped_storage()._cdata)

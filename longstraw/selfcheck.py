"""`check="numbers"`: at the first call, the compiled step against its traced graph run eagerly, on shortened inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from longstraw import compat
from longstraw.errors import NumbersDiffer
from longstraw.stages import Lowered

_LONGEST = 128


def checked_at_first_call(program: Lowered, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return `run` with a comparison before its first call.

    Args:
        program: the compiled step.
        run: `(*inputs) -> outputs` of the compiled step.
    """
    left = [program.step.partitioned.step.module]

    def call(*inputs: Any) -> Any:
        if left:
            compare(left.pop(), run, inputs)
        return run(*inputs)

    return call


def compare(module: fx.GraphModule, run: Callable[..., Any], inputs: Sequence[Any]) -> None:
    """Raise `NumbersDiffer` unless a compiled step has the outputs and gradients of its graph.

    Every size above 128 is scaled down first; if the graph doesn't accept the shorter inputs, the whole ones are used.
    """
    short = _shortened(module, inputs)
    try:
        expected = _outputs_and_gradients(module, short)
    except (RuntimeError, IndexError):
        short = list(inputs)
        expected = _outputs_and_gradients(module, short)
    found = _outputs_and_gradients(run, short)
    values = (node.meta.get("val") for node in module.graph.nodes)
    eps = max(torch.finfo(v.dtype).eps for v in values if isinstance(v, Tensor) and v.is_floating_point())
    allowed = min(50.0 * eps**0.75, 0.1)
    # A gradient that is zero but for rounding is measured against the others.
    floor = 1e-4 * max((float(t.double().nan_to_num().norm()) for t in expected if t is not None), default=0.0)
    for i, (one, other) in enumerate(zip(expected, found, strict=True)):
        if one is None or other is None:
            if one is not other:
                raise NumbersDiffer(f"Value {i} of the step has a gradient on one side only.", remedy=_REMEDY)
            continue
        one, other = one.double(), other.double()
        if torch.equal(one.isfinite(), other.isfinite()):
            one, other = one.nan_to_num(0.0, 0.0, 0.0), other.nan_to_num(0.0, 0.0, 0.0)
            error = float((one - other).norm()) / max(float(one.norm()), floor, eps)
        else:
            error = float("inf")
        if error > allowed:
            raise NumbersDiffer(f"Value {i} of the step differs from eager by {error:.1e}.", remedy=_REMEDY)


_REMEDY = (
    "This is a fault of longstraw: please report it with the step. longstraw.verify shows which parameter differs."
)


def _shortened(module: fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    sizes = [
        size for v in inputs for size in ((v,) if isinstance(v, int) else v.shape if isinstance(v, Tensor) else ())
    ]
    longest = max([_LONGEST, *sizes])
    factor = _LONGEST / longest

    def shorter(size: Any, actual: int) -> int:
        symbolic = bool(compat.expression(size).free_symbols)
        return max(1, math.ceil(actual * factor)) if symbolic and actual > _LONGEST else actual

    found: list[Any] = []
    for node, value in zip(placeholders, inputs, strict=True):
        traced = node.meta["val"]
        if isinstance(value, Tensor):
            for dim, size in enumerate(traced.shape):
                value = value.narrow(dim, 0, shorter(size, value.shape[dim]))
        elif isinstance(traced, torch.SymInt):
            value = shorter(traced, int(value))
        found.append(value)
    return found


def _outputs_and_gradients(run: Callable[..., Any], inputs: Sequence[Any]) -> list[Tensor | None]:
    leaves = [
        x.detach().requires_grad_(x.requires_grad and x.is_floating_point()) if isinstance(x, Tensor) else x
        for x in inputs
    ]
    outputs = [x for x in pytree.tree_leaves(run(*leaves)) if isinstance(x, Tensor)]
    wanted = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    differentiable = [x for x in outputs if x.requires_grad]
    grads: Sequence[Tensor | None] = [None] * len(wanted)
    if differentiable and wanted:
        total = torch.stack([x.double().sum() for x in differentiable]).sum()
        grads = torch.autograd.grad(total, wanted, allow_unused=True)
    return [*(x.detach() for x in outputs), *grads]

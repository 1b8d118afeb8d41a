"""Scans as library ops, so that a trace sees one node where a model's own code would loop over tokens.

Every op is `longstraw::<name>(Tensor[] inputs, Tensor? state) -> (Tensor output, Tensor state)`; calling it runs the
scan from its first token on, so that every stage's graph runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, library

from longstraw.errors import UnsupportedOp
from longstraw.scans import delta_rule, linear_recurrence

NAMESPACE = "longstraw"
Step = Callable[..., tuple[Tensor, Tensor]]


users_names: dict[str, str] = {}
"""What users call the functions that ops of this namespace stand for, by the ops' names."""


def scan_op(
    name: str,
    step: Step,
    *,
    output: Callable[..., Tensor],
    state: Callable[..., Tensor],
    fake: Callable[[list[Tensor]], tuple[Tensor, Tensor]] | None = None,
) -> Any:
    """Register a scan as an op and return it.

    Args:
        name: its name in the namespace `longstraw`.
        step: `(*inputs, state) -> (output, state after)`, differentiable.
        output: `(*inputs) -> a tensor like the output`.
        state: `(*inputs) -> the state before the first token`.
        fake: `inputs -> fake values of (output, state)`, in place of what `output` and `state` say.
    """

    def run(inputs: list[Tensor], start: Tensor | None) -> tuple[Tensor, Tensor]:
        out, last = step(*inputs, state(*inputs) if start is None else start)
        return out.clone(), last.clone()

    def traced(inputs: list[Tensor], start: Tensor | None) -> tuple[Tensor, Tensor]:
        if fake is not None:
            return fake(inputs)
        return torch.empty_like(output(*inputs)), torch.empty_like(state(*inputs))

    def setup(ctx: Any, inputs: tuple[list[Tensor], Tensor | None], output: tuple[Tensor, Tensor]) -> None:
        tensors, start = inputs
        ctx.save_for_backward(*tensors, start)

    def backward(ctx: Any, grad: Tensor | None, grad_last: Tensor | None) -> tuple[list[Tensor | None], Tensor | None]:
        *tensors, start = ctx.saved_tensors
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
            first = state(*leaves) if start is None else start.detach().requires_grad_()
            out, last = step(*leaves, first)
        pairs = [(o, g) for o, g in ((out, grad), (last, grad_last)) if g is not None]
        wanted = [t for t in (*leaves, first) if t.requires_grad]
        found = torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
        grads = dict(zip(map(id, wanted), found, strict=True))
        return [grads.get(id(t)) for t in leaves], None if start is None else grads.get(id(first))

    op = library.custom_op(
        f"{NAMESPACE}::{name}", run, mutates_args=(), schema="(Tensor[] inputs, Tensor? start) -> (Tensor, Tensor)"
    )
    op.register_fake(traced)
    op.register_autograd(backward, setup_context=setup)
    return getattr(getattr(torch.ops, NAMESPACE), name)


def _refuse(inputs: list[Tensor], why: str) -> Tensor:
    raise UnsupportedOp(f"A scan can't be run: {why}.", remedy="Give it tensors only.")


def _refused() -> Any:
    op = library.custom_op(
        f"{NAMESPACE}::refused_scan", _refuse, mutates_args=(), schema="(Tensor[] inputs, str why) -> Tensor"
    )
    op.register_fake(lambda inputs, why: torch.empty_like(inputs[0]))
    return getattr(torch.ops, NAMESPACE).refused_scan


REFUSED = _refused()
"""Stands in a trace for a scan that can't be run: nothing may be raised while Dynamo traces."""

GATED_DELTA_RULE = scan_op(
    "gated_delta_rule", delta_rule.gated_delta_rule, output=delta_rule.empty_output, state=delta_rule.empty_state
)
LINEAR_ATTENTION = scan_op(
    "linear_attention", delta_rule.linear_attention, output=delta_rule.empty_output, state=delta_rule.empty_state
)
LINEAR_RECURRENCE = scan_op(
    "linear_recurrence",
    linear_recurrence.linear_recurrence,
    output=lambda decay, value: torch.empty_like(value),
    state=lambda decay, value: value.new_zeros(
        (value.shape[0], *value.shape[2:]), dtype=torch.promote_types(value.dtype, torch.float32)
    ),
)
SELECTIVE_SCAN = scan_op(
    "selective_scan",
    linear_recurrence.selective_scan,
    output=lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format),
    state=lambda x, step, rate, *_: x.new_zeros(
        (x.shape[0], *rate.shape), dtype=torch.promote_types(x.dtype, torch.float32)
    ),
)

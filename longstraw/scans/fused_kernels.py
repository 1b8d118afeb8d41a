"""Kernels of flash-linear-attention for the delta rule and linear attention: state in, state out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, "Tensor | None", Tensor], tuple[Tensor, Tensor]]


def fused_kernel(value: Tensor, log_decay: Tensor, beta: Tensor | None) -> Kernel | None:
    """Return the library's kernel for such inputs, or None: where it isn't installed, and for other than half types."""
    if not value.is_cuda or value.dtype not in (torch.bfloat16, torch.float16):
        return None
    name = "linear_attention" if beta is None else "channel_delta_rule" if log_decay.dim() == 4 else "delta_rule"
    return _kernels().get(name)


@functools.cache
def _kernels() -> dict[str, Kernel]:
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.kda import chunk_kda
        from fla.ops.simple_gla import chunk_simple_gla
    except ImportError:
        return {}
    return {
        "delta_rule": functools.partial(_delta_rule, chunk_gated_delta_rule),
        "channel_delta_rule": functools.partial(_delta_rule, chunk_kda),
        "linear_attention": functools.partial(_linear_attention, chunk_simple_gla),
    }


def _delta_rule(
    run: Any, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    assert beta is not None
    q, k, b = (x.to(value.dtype) for x in (query, key, beta))
    out, last = run(q, k, value, log_decay.float(), b, scale=1.0, initial_state=state.float(), output_final_state=True)
    return out, last


def _linear_attention(
    run: Any, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, _: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    groups = value.shape[2] // key.shape[2]
    q, k = (x.to(value.dtype).repeat_interleave(groups, 2) for x in (query, key))
    out, last = run(q, k, value, log_decay.float(), scale=1.0, initial_state=state.float(), output_final_state=True)
    return out, last

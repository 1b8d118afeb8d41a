"""Linear recurrences of independent channels, `h_t = a_t h_{t-1} + b_t`, and the selective scan built on them.

The scan is parallel within a chunk (pairs of neighbours are combined, then neighbours of pairs: Hillis and Steele
1986) and sequential between chunks. Its backward is the same recurrence from right to left.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

CHUNK = 64


def linear_recurrence(decay: Tensor, value: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Run `h_t = decay_t h_{t-1} + value_t` over a span of tokens.

    Args:
        decay, value: `[rows, tokens, ...]`.
        state: `[rows, ...]` before the span.

    Returns:
        All `h` `[rows, tokens, ...]` in value's dtype, and the last one. Computed in at least float32.
    """
    dtype = torch.promote_types(value.dtype, torch.float32)
    found: Tensor = _Scan.apply(decay.to(dtype), value.to(dtype), state.to(dtype))  # type: ignore[no-untyped-call]
    return found.to(value.dtype), found[:, -1]


def selective_scan(
    x: Tensor, step: Tensor, rate: Tensor, write: Tensor, read: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the selective state space of Gu and Dao 2023 (arXiv 2312.00752) over a span of tokens.

    `h_t = exp(step_t rate) h_{t-1} + step_t x_t write_t` and `y_t = h_t read_t`: a channel has `width` numbers of
    state.

    Args:
        x, step: `[rows, tokens, channels]`.
        rate: `[channels, width]`, at most 0.
        write, read: `[rows, tokens, width]`.
        state: `[rows, channels, width]` before the span.

    Returns:
        The output `[rows, tokens, channels]` in x's dtype, and the state after the span. Only one chunk's
        `[chunk, channels, width]` values are held at once; backward computes them again.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    wide = [t.to(dtype) for t in (x, step, rate, write, read)]
    outs = []
    state = state.to(dtype)
    for lo in range(0, x.shape[1], CHUNK):
        cut = [t if i == 2 else t[:, lo : lo + CHUNK] for i, t in enumerate(wide)]
        out, state = checkpoint(_selective_chunk, *cut, state, use_reentrant=False, preserve_rng_state=False)
        outs.append(out)
    return torch.cat(outs, 1).to(x.dtype), state


def _selective_chunk(
    x: Tensor, step: Tensor, rate: Tensor, write: Tensor, read: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    decay = (step[..., None] * rate).exp()
    states, last = linear_recurrence(decay, (step * x)[..., None] * write[:, :, None], state)
    return (states @ read[..., None]).squeeze(-1), last


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, decay: Tensor, value: Tensor, state: Tensor) -> Tensor:
        states = _scan(decay, value, state)
        ctx.save_for_backward(decay, states, state)
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        decay, states, state = ctx.saved_tensors
        # The gradient of b_t is grad_t + a_{t+1} (gradient of b_{t+1}).
        later = torch.cat([decay[:, 1:], torch.zeros_like(decay[:, :1])], 1)
        flow = _scan(later.flip(1), grad.flip(1), torch.zeros_like(state)).flip(1)
        before = torch.cat([state[:, None], states[:, :-1]], 1)
        return flow * before, flow, flow[:, 0] * decay[:, 0]


def _scan(decay: Tensor, value: Tensor, state: Tensor) -> Tensor:
    """Return all `h_t = decay_t h_{t-1} + value_t` along dim 1."""
    outs = []
    for lo in range(0, value.shape[1], CHUNK):
        a, b = decay[:, lo : lo + CHUNK], value[:, lo : lo + CHUNK]
        reach = 1
        while reach < a.shape[1]:
            a, b = (
                torch.cat([a[:, :reach], a[:, reach:] * a[:, :-reach]], 1),
                torch.cat([b[:, :reach], b[:, reach:] + a[:, reach:] * b[:, :-reach]], 1),
            )
            reach *= 2
        outs.append(b + a * state[:, None])
        state = outs[-1][:, -1]
    return torch.cat(outs, 1)

"""Linear attention with decay, and the gated delta rule, in chunks.

A head holds a matrix `S` `[key width, value width]`. For every token, with `a_t = exp(log_decay_t)`:

    linear attention    S_t = a_t S_{t-1} + k_t v_t^T                              o_t = q_t S_t
    gated delta rule    S_t = a_t S_{t-1} + b_t k_t (v_t - (a_t S_{t-1})^T k_t)^T  o_t = q_t S_t

`a_t` is one number per head (Gated DeltaNet, Yang et al. 2024, arXiv 2412.06464; state space duality, Dao and Gu 2024,
arXiv 2405.21060) or one per key channel (Kimi Delta Attention, arXiv 2510.26692). Within a chunk the delta rule's
corrections solve one triangular system (the UT transform of arXiv 2406.06484); between chunks only `S` is carried.

Everything is computed in at least float32; half types on CUDA go through the kernels of flash-linear-attention where
it is installed. Inputs are `[rows, tokens, heads, width]`; key heads may be fewer than value
heads, key head `h // (value heads / key heads)` serving value head `h`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from longstraw.scans.fused_kernels import fused_kernel

CHUNK = 64
CHANNEL_CHUNK = 16
"""Chunk where each key channel decays by itself: [chunk, chunk, key width] products are held at once."""


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the gated delta rule over a span of tokens.

    Args:
        query, key: `[rows, tokens, key_heads, key_width]`, queries scaled already.
        value: `[rows, tokens, heads, value_width]`.
        log_decay: `[rows, tokens, heads]`, or `[rows, tokens, heads, key_width]` for a decay of each channel;
            at most 0.
        beta: `[rows, tokens, heads]`, how much of the old value is replaced.
        state: `[rows, heads, key_width, value_width]` before the span.

    Returns:
        The output `[rows, tokens, heads, value_width]` in value's dtype, and the state after the span.
    """
    return _run(query, key, value, log_decay, beta, state)


def linear_attention(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run linear attention with decay over a span of tokens; arguments as for `gated_delta_rule`."""
    return _run(query, key, value, log_decay, None, state)


def empty_state(query: Tensor, key: Tensor, value: Tensor, *_: Tensor) -> Tensor:
    """The state before the first token."""
    dtype = torch.promote_types(value.dtype, torch.float32)
    return value.new_zeros((value.shape[0], value.shape[2], key.shape[3], value.shape[3]), dtype=dtype)


def empty_output(query: Tensor, key: Tensor, value: Tensor, *_: Tensor) -> Tensor:
    """A tensor like the output."""
    return torch.empty_like(value, memory_format=torch.contiguous_format)


def _run(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    kernel = fused_kernel(value, log_decay, beta)
    if kernel is not None:
        return kernel(query, key, value, log_decay, beta, state)
    tokens, heads = value.shape[1:3]
    dtype = torch.promote_types(value.dtype, torch.float32)
    by_channel = log_decay.dim() == 4
    size = min(CHANNEL_CHUNK if by_channel else CHUNK, tokens)
    groups = heads // key.shape[2]

    def chunks(x: Tensor) -> Tensor:
        """[rows, tokens, heads, ...] -> [rows, heads, chunks, size, ...], padded with zeros."""
        x = x.to(dtype).transpose(1, 2)
        short = -tokens % size
        if short:
            x = F.pad(x, (0, 0) * (x.dim() - 3) + (0, short))
        x = x.unflatten(2, (-1, size))
        return x.repeat_interleave(groups, 1) if x.shape[1] != heads else x

    q, k, v = chunks(query), chunks(key), chunks(value)
    decays = chunks(log_decay).cumsum(3)
    decays = decays if by_channel else decays[..., None]
    from_start = decays.exp()
    to_end = (decays[..., -1:, :] - decays).exp()
    inside = _pairs(q, k, decays)
    reads: Tensor | None = None
    if beta is not None:
        b = chunks(beta)[..., None]
        system = _pairs(k * b, k, decays)  # its diagonal counts as ones
        both = torch.cat([v * b, k * b * from_start], -1)
        both = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
        v, reads = both.split([v.shape[-1], k.shape[-1]], -1)
    q, k = q * from_start, (k * to_end).transpose(-1, -2)
    whole = from_start[..., -1, :, None]  # decay of a whole chunk, [rows, heads, chunks, 1 or key width, 1]
    state = state.to(dtype)
    out = []
    for i in range(q.shape[2]):
        new = v[:, :, i] if reads is None else v[:, :, i] - reads[:, :, i] @ state
        out.append(q[:, :, i] @ state + inside[:, :, i] @ new)
        state = state * whole[:, :, i] + k[:, :, i] @ new
    result = torch.stack(out, 2).flatten(2, 3)[:, :, :tokens].transpose(1, 2)
    return result.to(value.dtype).contiguous(), state


def _pairs(left: Tensor, right: Tensor, decays: Tensor) -> Tensor:
    """Return `sum_d left_i right_j exp(decays_i - decays_j)` for j <= i, zero elsewhere: [..., size, size]."""
    size = left.shape[-2]
    later = torch.ones(size, size, dtype=torch.bool, device=left.device).triu(1)
    if decays.shape[-1] == 1:
        steps = decays - decays.transpose(-1, -2)
        return (left @ right.transpose(-1, -2)) * steps.masked_fill(later, -torch.inf).exp()
    steps = (decays[..., :, None, :] - decays[..., None, :, :]).masked_fill(later[..., None], -torch.inf)
    return torch.einsum("...id,...jd,...ijd->...ij", left, right, steps.exp())

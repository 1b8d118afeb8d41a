"""Causal convolutions, shifts and running sums along tokens: what they carry is a few inputs, or the sum so far."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, dilation: int, groups: int, tail: Tensor
) -> tuple[Tensor, Tensor]:
    """Convolve a span with a kernel that ends at each token.

    Args:
        x: `[rows, channels, tokens]`.
        weight: `[out_channels, channels / groups, width]`; bias `[out_channels]`.
        dilation: distance of the kernel's entries in tokens.
        groups: as in `torch.nn.Conv1d`; `channels` for a depthwise convolution.
        tail: `[rows, channels, dilation * (width - 1)]`: the last inputs before the span.

    Returns:
        `[rows, out_channels, tokens]`, and the last inputs up to the span's end.
    """
    joined = torch.cat([tail.to(x.dtype), x], -1)
    out = F.conv1d(joined, weight, bias, dilation=dilation, groups=groups)
    return out, joined[..., joined.shape[-1] - tail.shape[-1] :]


def shift(x: Tensor, dim: int, by: int, tail: Tensor) -> tuple[Tensor, Tensor]:
    """Give every token the value of an earlier one.

    Args:
        x: the span, tokens along `dim`.
        dim: the token dim.
        by: how many tokens earlier.
        tail: the last `by` values before the span, along `dim`.

    Returns:
        A value of `x`'s shape, and the last values up to the span's end.
    """
    joined = torch.cat([tail.to(x.dtype), x], dim)
    return joined.narrow(dim, 0, x.shape[dim]), joined.narrow(dim, x.shape[dim], by)


def running_sum(x: Tensor, dim: int, dtype: torch.dtype, total: Tensor) -> tuple[Tensor, Tensor]:
    """Sum along tokens.

    Args:
        x: the span, tokens along `dim`.
        dim: the token dim.
        dtype: of the result.
        total: the sum before the span, of `x`'s shape without `dim`, in at least float32.

    Returns:
        The sums up to each token, and the last one.
    """
    out = x.cumsum(dim, dtype=torch.promote_types(dtype, total.dtype)) + total.unsqueeze(dim)
    return out.to(dtype), out.select(dim, -1)

"""Merge attention outputs over disjoint key sets by log-sum-exp.

A partial result is `(out, lse)`: `out` [..., width] is the softmax-weighted sum of values over one set of keys and
`lse` [...] the natural logarithm of the sum of exponentiated scores. A query that sees no key of a set has `out` 0
and `lse` -inf there; where that holds for every set, the merged result is again 0 and -inf, and every gradient is 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The partial result over the union of the key sets; differentiable, in at least float32."""
    assert len(outs) == len(lses) > 0
    dtype = accumulate_dtype(outs[0].dtype)
    wide = [lse.to(dtype) for lse in lses]
    peak = torch.stack([lse.detach() for lse in wide]).amax(0)
    peak = peak.masked_fill(peak == -torch.inf, 0)
    weights = [(lse - peak).exp() for lse in wide]
    total = torch.stack(weights).sum(0)
    empty = total == 0
    total = total.masked_fill(empty, 1)
    out = torch.stack([(weight / total)[..., None] * part for weight, part in zip(weights, outs, strict=True)]).sum(0)
    return out, (peak + total.log()).masked_fill(empty, -torch.inf)


def merge_into(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge one more partial result into `out`, `lse` in place; not differentiable."""
    total = torch.logaddexp(lse, part_lse)
    shift = total.masked_fill(total == -torch.inf, 0)
    out.mul_((lse - shift).exp()[..., None]).addcmul_(part_out, (part_lse - shift).exp()[..., None])
    lse.copy_(total)


def merge_sink_into(out: Tensor, lse: Tensor, sink: Tensor) -> None:
    """Merge a key of logit `sink` and value 0 into `out`, `lse` in place."""
    total = torch.logaddexp(lse, sink)
    shift = total.masked_fill(total == -torch.inf, 0)
    out.mul_((lse - shift).exp()[..., None])
    lse.copy_(total)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which partial results of `dtype` are summed."""
    return torch.promote_types(dtype, torch.float32)

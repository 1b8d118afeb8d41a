"""Fold queries that read the same keys into units, the layout of the part kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Fold:
    """Folds [rows, heads, ...] into [units, group, ...] such that the queries of a unit read the same keys.

    A unit is a head of a shared range, or a row and head of a range that has rows. `unit_heads` is the number of
    key (and value) heads; where these differ, their least common multiple.
    """

    rows: int
    heads: int
    unit_heads: int
    shared: bool

    def queries(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[rows, heads, ...] -> [units, group, ...], contiguous."""
        x = x.to(dtype).unflatten(1, (self.unit_heads, -1))
        return (x.transpose(0, 1).flatten(1, 2) if self.shared else x.flatten(0, 1)).contiguous()

    def undo(self, x: Tensor) -> Tensor:
        """[units, group, ...] -> [rows, unit_heads, heads / unit_heads, ...], a view."""
        if self.shared:
            return x.unflatten(1, (self.rows, -1)).transpose(0, 1)
        return x.unflatten(0, (self.rows, self.unit_heads))

    def bias(self, block: Tensor, dtype: torch.dtype) -> Tensor:
        """[rows|1, heads|1, q, k], bool (True = seen) or float -> [units|1, group|1, q, k], to be added."""
        if block.dtype == torch.bool:
            block = torch.zeros(block.shape, dtype=dtype, device=block.device).masked_fill_(~block, -torch.inf)
        if block.shape[0] == block.shape[1] == 1:
            return block.to(dtype)
        return self.queries(block.expand(self.rows, self.heads, -1, -1), dtype)

    def keys(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[rows or 1, key_heads, n, width] -> [units, n, width]."""
        x = x.to(dtype)
        if x.shape[1] != self.unit_heads:
            x = x.repeat_interleave(self.unit_heads // x.shape[1], 1)
        return x.flatten(0, 1)

    def add_keys_grad(self, target: Tensor, grad: Tensor) -> None:
        """Add [units, n, width] to an accumulator [rows or 1, key_heads, n, width]."""
        grad = grad.unflatten(0, (target.shape[0], target.shape[1], -1))
        target.add_((grad[:, :, 0] if grad.shape[2] == 1 else grad.sum(2)).to(target.device))

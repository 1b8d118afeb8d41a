"""Associative scans with a given combine function, `y_t = combine(y_{t-1}, x_t)`, computed in parallel over a span.

What a span carries is its last result. There may be no neutral element to begin with, so a flag beside the result says
whether there is one: nothing came before where it is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longstraw import compat


@dataclass(frozen=True)
class AssociativeScan:
    """A scan of one or several values.

    Attributes:
        combine: `(*left, *right, *extras) -> values`, each `[rows, ...]`; it treats rows independently.
        num_values: how many values it combines.
        packed: whether outputs are one tensor `[rows, tokens, numbers]` of all values side by side, as `pack` makes it;
            otherwise the output of the only value is itself.
    """

    combine: Callable[..., Sequence[Tensor]]
    num_values: int
    packed: bool

    def whole(self, *inputs: Tensor) -> Tensor:
        """Run the scan from the first token on.

        Args:
            inputs: values `[rows, tokens, ...]`, then what the combine function reads beside.
        """
        found = self._scan(*self._parted(inputs))
        return pack(found, 2) if self.packed else found[0]

    def state(self, *inputs: Tensor) -> Tensor:
        """Return the state before the first token, `[rows, numbers of one token + 1]`."""
        values, _ = self._parted(inputs)
        numbers = sum(_numbers(x.shape[2:], x) for x in values)
        return torch.zeros((values[0].shape[0], numbers + 1), dtype=_dtype(values, floor=True), device=values[0].device)

    def output(self, *inputs: Tensor) -> Tensor:
        """Return a tensor like the output."""
        values, _ = self._parted(inputs)
        if not self.packed:
            return torch.empty_like(values[0], memory_format=torch.contiguous_format)
        numbers = sum(_numbers(x.shape[2:], x) for x in values)
        return torch.empty((*values[0].shape[:2], numbers), dtype=_dtype(values), device=values[0].device)

    def step(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Run the scan over a span; the last input is the state before it. Return the output and the state after."""
        *given, state = inputs
        values, extras = self._parted(given)
        found = self._scan(values, extras)
        carried, begun = unpack(state[:, :-1], [x[:, 0] for x in values], 1), state[:, -1] != 0
        firsts = [y[:, 0] for y in found]  # what is there before has no meaning where nothing came before
        before = [
            torch.where(_beside(begun, first), old, first)[:, None].expand_as(y)
            for old, first, y in zip(carried, firsts, found, strict=True)
        ]
        joined = self._over_tokens(*before, *found, *extras)
        outs = [torch.where(_beside(begun, y), j, y) for j, y in zip(joined, found, strict=True)]
        last = pack([y[:, -1] for y in outs], 1).to(state.dtype)
        after = torch.cat([last, torch.ones_like(last[:, :1])], 1)
        return pack(outs, 2) if self.packed else outs[0], after

    def _parted(self, inputs: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        return inputs[: self.num_values], inputs[self.num_values :]

    def _scan(self, values: Sequence[Tensor], extras: Sequence[Tensor]) -> Sequence[Tensor]:
        return compat.associative_scan(self._over_tokens, values, extras, dim=1)

    def _over_tokens(self, *inputs: Tensor) -> list[Tensor]:
        """Combine values `[rows, tokens, ...]` token by token."""
        sides = 2 * self.num_values
        if inputs[0].shape[1] == 0:
            return list(inputs[: self.num_values])
        dims = (*[1] * sides, *[None] * (len(inputs) - sides))
        return list(torch.vmap(lambda *xs: tuple(self.combine(*xs)), in_dims=dims, out_dims=1)(*inputs))


def pack(values: Sequence[Tensor], dims: int) -> Tensor:
    """Return values side by side: `[*first dims, numbers]`, complex ones as two real numbers each."""
    dtype = _dtype(values)
    real = [torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in values]
    return torch.cat([x.reshape(*x.shape[:dims], -1).to(dtype) for x in real], dims)


def unpack(packed: Tensor, like: Sequence[Tensor], dims: int) -> list[Tensor]:
    """Return the values that `pack` put side by side, with the shapes after the first dims and the dtypes of others."""
    parts = packed.split([_numbers(x.shape[dims:], x) for x in like], -1)
    return [unpacked(part, tuple(x.shape[dims:]), x.dtype) for part, x in zip(parts, like, strict=True)]


def unpacked(part: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return one value of those that `pack` put side by side.

    Args:
        part: its numbers, in the last dim.
        shape: the sizes that come in place of that dim.
        dtype: the value's.
    """
    lead = part.shape[:-1]
    if dtype.is_complex:
        pairs = part.to(dtype.to_real()).reshape(*lead, *shape, 2)
        return torch.view_as_complex(pairs.contiguous())
    return part.to(dtype).reshape(*lead, *shape)


def _numbers(shape: Sequence[int], like: Tensor) -> int:
    count = 2 if like.is_complex() else 1
    for size in shape:
        count *= size
    return count


def _dtype(values: Sequence[Tensor], *, floor: bool = False) -> torch.dtype:
    """Return the real dtype that holds all values; with a floor, at least float32."""
    found = torch.float32 if floor else values[0].dtype.to_real()
    for x in values:
        found = torch.promote_types(found, x.dtype.to_real())
    return found


def _beside(flags: Tensor, value: Tensor) -> Tensor:
    """Return flags `[rows]` in a shape that broadcasts with a value `[rows, ...]`."""
    return flags.reshape(-1, *[1] * (value.dim() - 1))

"""Reads and writes ranges of rows and tokens of values whose dims are described by a layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longstraw import compat


@dataclass(frozen=True)
class Place:
    """A layout with numbers in it: what a value's dims are when its flattened dims are taken apart.

    Attributes:
        shape: sizes of all factors, in order; -1 stands for the rows that are there, -2 for the tokens.
        groups: how many factors each dim of the value has.
        row_dim, token_dim: where rows and tokens stand among the factors, or None.
        start, stop: the tokens that the whole value covers (row coordinates).
    """

    shape: tuple[int, ...]
    groups: tuple[int, ...]
    row_dim: int | None
    token_dim: int | None
    start: int
    stop: int

    def apart(self, value: Tensor, num_rows: int, num_tokens: int) -> Tensor:
        """Return the value with every factor in a dim of its own (a view where strides allow)."""
        sizes = [num_rows if size == -1 else num_tokens if size == -2 else size for size in self.shape]
        return value.reshape(sizes)

    def joined(self, value: Tensor) -> Tensor:
        """Return a value taken apart as it was."""
        shape, at = [], 0
        for count in self.groups:
            size = 1
            for extent in value.shape[at : at + count]:
                size *= extent
            shape.append(size)
            at += count
        return value.reshape(shape)


def take(
    value: Tensor, place: Place, *, num_rows: int, rows: Sequence[int] | None, covers: tuple[int, int], lo: int, hi: int
) -> Tensor:
    """Return tokens `lo` to `hi` (row coordinates) of some rows, in the value's own layout.

    Args:
        value: covers `num_rows` rows and the tokens `covers`.
        place: its layout.
        num_rows: rows that the value has.
        rows: which of them to take; None takes all.
        covers: tokens that the value has.
        lo, hi: tokens to take.
    """
    parts = place.apart(value, num_rows, covers[1] - covers[0])
    if place.token_dim is not None:
        assert covers[0] <= lo <= hi <= covers[1], "a value is read for tokens that it has nothing for"
        parts = parts.narrow(place.token_dim, lo - covers[0], hi - lo)
    if place.row_dim is not None and rows is not None:
        parts = _rows(parts, place.row_dim, rows)
    return place.joined(parts)


def _rows(parts: Tensor, dim: int, rows: Sequence[int]) -> Tensor:
    first, count = rows[0], len(rows)
    if list(rows) == list(range(first, first + count)):
        return parts.narrow(dim, first, count)
    return parts.index_select(dim, torch.tensor(rows, device=parts.device))


def put(
    whole: Tensor,
    part: Tensor,
    place: Place,
    *,
    num_rows: int,
    rows: Sequence[int],
    part_rows: int,
    lo: int,
    hi: int,
    add: bool = False,
) -> None:
    """Write tokens `lo` to `hi` of some rows of `whole` (contiguous); one part row is written to all of `rows`.

    Args:
        whole: covers `num_rows` rows and the tokens of `place`.
        part: covers `part_rows` rows (1, or one for each of `rows`) and the tokens `lo` to `hi`.
        add: add instead of overwrite.
    """
    target = place.apart(whole, num_rows, place.stop - place.start)
    assert compat.memory(target) == compat.memory(whole), "the written value is contiguous"
    source = place.apart(part, part_rows, hi - lo)
    if place.token_dim is not None:
        target = target.narrow(place.token_dim, lo - place.start, hi - lo)
    if place.row_dim is None:
        target.add_(source) if add else target.copy_(source)
        return
    index = torch.tensor(list(rows), device=whole.device)
    if part_rows == 1 and len(rows) > 1:
        source = source.expand([len(rows) if d == place.row_dim else -1 for d in range(source.ndim)])
    if add:
        target.index_add_(place.row_dim, index, source.to(target.dtype))
    else:
        target.index_copy_(place.row_dim, index, source.to(target.dtype))


def sum_rows(part: Tensor, place: Place, num_rows: int, num_tokens: int) -> Tensor:
    """Return the sum over rows of a part, as a part with one row."""
    if place.row_dim is None or num_rows == 1:
        return part
    return place.joined(place.apart(part, num_rows, num_tokens).sum(place.row_dim, keepdim=True))

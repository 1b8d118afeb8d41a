"""Captured per-token state of one node of the prefix tree: preallocated, contiguous, with gradients of the same layout.

A store is owned by the node that allocated it. Tokens are appended in order; `restore` says how many of them the
next span sees; after `release` every use is an error.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longstraw.errors import StateMisuse
from longstraw.runtime.attention import KeyRange
from longstraw.stages import Slot


class Store:
    """Keys and values of the tokens `start` to `stop` of some rows, for every slot.

    Args:
        slots: what is kept per token.
        owner: who owns it, for messages.
        rows: number of rows (1 for a shared prefix).
        start, stop: row coordinates.
        device: where it lives.
    """

    def __init__(
        self, slots: Sequence[Slot], *, owner: str, rows: int, start: int, stop: int, device: torch.device
    ) -> None:
        self.owner, self.start, self.stop = owner, start, stop
        self.visible = start
        self._written = start
        self._values: list[Tensor] | None = [
            torch.empty((rows, slot.heads, stop - start, slot.width), dtype=slot.dtype, device=device) for slot in slots
        ]
        self._grads: list[Tensor] | None = None

    def append(self, values: Sequence[Tensor]) -> None:
        """Write the state of the next tokens, `[rows, heads, tokens, width]` for each slot."""
        stores = self._alive()
        count = values[0].shape[2] if values else 0
        if self._written + count > self.stop:
            raise StateMisuse(
                f"{self.owner} appends tokens up to {self._written + count}, its store ends at {self.stop}."
            )
        for store, value in zip(stores, values, strict=True):
            store.narrow(2, self._written - self.start, count).copy_(value)
        self._written += count
        self.visible = self._written

    def restore(self, until: int) -> None:
        """Show later spans the tokens before `until` only."""
        self._alive()
        if not self.start <= until <= self._written:
            raise StateMisuse(f"{self.owner}: token {until} was not captured ({self.start} to {self._written} were).")
        self.visible = until

    def track_gradients(self, dtype: torch.dtype) -> None:
        """Allocate gradients, zero, in at least `dtype`."""
        self._grads = [
            torch.zeros_like(value, dtype=torch.promote_types(value.dtype, dtype)) for value in self._alive()
        ]

    def ranges(self, key_slot: int, value_slot: int) -> KeyRange | None:
        """Return the visible keys and values with their gradient accumulators, or None when nothing is visible."""
        count = self.visible - self.start
        stores = self._alive()
        if count == 0:
            return None
        key, value = (stores[slot].narrow(2, 0, count) for slot in (key_slot, value_slot))
        grads: tuple[Tensor | None, Tensor | None] = (None, None)
        if self._grads is not None:
            grads = (self._grads[key_slot].narrow(2, 0, count), self._grads[value_slot].narrow(2, 0, count))
        return KeyRange(self.start, key, value, *grads)

    def gradients(self, lo: int, hi: int) -> list[Tensor]:
        """Return the accumulated gradients of tokens `lo` to `hi`, one view for each slot."""
        self._alive()
        assert self._grads is not None, "gradients are tracked"
        return [grad.narrow(2, lo - self.start, hi - lo) for grad in self._grads]

    def release(self) -> None:
        """Give the memory back; the store can't be used afterwards."""
        self._alive()
        self._values = self._grads = None

    @property
    def released(self) -> bool:
        """Whether `release` was called."""
        return self._values is None

    @property
    def num_bytes(self) -> int:
        """Bytes that the store holds now."""
        return sum(t.numel() * t.element_size() for t in (*(self._values or ()), *(self._grads or ())))

    def _alive(self) -> list[Tensor]:
        if self._values is None:
            raise StateMisuse(f"The state of {self.owner} was released.")
        return self._values

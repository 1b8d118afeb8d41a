"""Captured state of one node of the prefix tree: preallocated on its tier, with gradients of the same layout.

A store is owned by the node that allocated it. Tokens are appended in order; `restore` says how many of them the next
span sees; after `release` every use is an error. Tokens that no later token can see (outside a sliding window, padding)
are not kept: `Kept` says which are. The step's `PagePool` knows who has which tokens and who reads them, and is asked
before a store is used; a page of it is a range of tokens in each tensor here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longstraw.errors import StateMisuse
from longstraw.options import Options
from longstraw.runtime.boundary import Boundaries
from longstraw.runtime.key_parts import KeyRange
from longstraw.runtime.pages import Owner, PagePool
from longstraw.runtime.tiers import Tier
from longstraw.stages import Slot


@dataclass(frozen=True)
class Kept:
    """Which runs of tokens a slot keeps, in order and apart, and where each begins in the store."""

    runs: tuple[tuple[int, int], ...]

    @property
    def total(self) -> int:
        """Number of tokens kept."""
        return sum(stop - start for start, stop in self.runs)

    def overlaps(self, lo: int, hi: int) -> list[tuple[int, int, int]]:
        """Return `(first token, last token + 1, place in the store)` of what is kept of the tokens `lo` to `hi`."""
        found, place = [], 0
        for start, stop in self.runs:
            a, b = max(start, lo), min(stop, hi)
            if a < b:
                found.append((a, b, place + a - start))
            place += stop - start
        return found


def merged(runs: Sequence[tuple[int, int]]) -> Kept:
    """Return runs, given in order, with those that touch or overlap joined and empty ones left out."""
    joined: list[tuple[int, int]] = []
    for start, stop in runs:
        if start >= stop:
            continue
        if joined and joined[-1][1] >= start:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((start, stop))
    return Kept(tuple(joined))


class Store:
    """Keys and values of the tokens `start` to `stop` of some rows, for every slot.

    Args:
        slots: what is kept per token.
        kept: for each slot, which tokens.
        owner: who owns it, for messages.
        rows: number of rows (1 for a shared prefix).
        start, stop: row coordinates.
        tier: where it rests.
        boundary: boundary states before the first token.
        path: stores of the tokens before, which spans of this node read: empty for the transaction's own store, that of
            a replay otherwise.
        pages: the step's; None stands for a pool of the store's own.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        kept: Sequence[Kept],
        *,
        owner: str,
        rows: int,
        start: int,
        stop: int,
        tier: Tier,
        boundary: Sequence[Tensor] = (),
        path: Sequence[Store] = (),
        pages: PagePool | None = None,
    ) -> None:
        self.boundaries = Boundaries(boundary, start=start, owner=owner, tier=tier)
        self.start, self.stop = start, stop
        self.owner = Owner("replay" if path else "transaction", owner)
        self._kept = tuple(kept)
        self._tier = tier
        self._values: list[Tensor] | None = [
            tier.empty((rows, slot.heads, kept.total, slot.width), slot.dtype, owner=owner)
            for slot, kept in zip(slots, kept, strict=True)
        ]
        self._learns = [slot.learns for slot in slots]
        self._grads: list[Tensor | None] | None = None
        self.pages = self._register(PagePool(Options.page_tokens) if pages is None else pages, path)

    def _register(self, pages: PagePool, path: Sequence[Store]) -> PagePool:
        """Take pages for the tokens that any slot keeps, and a share of those before; return the pool."""
        runs = merged(sorted({run for kept in self._kept for run in kept.runs})).runs
        pages.allocate(self.owner, self.start, self.stop, runs=runs)
        for store in path:
            pages.share(self.owner, store.owner)
        return pages

    def append(self, values: Sequence[Tensor]) -> None:
        """Write the state of the next tokens, `[rows, heads, tokens, width]` for each slot."""
        stores = self._alive("written")
        if not stores:  # a model without attention
            return
        lo, hi = self.pages.extend(self.owner, values[0].shape[2])
        for store, kept, value in zip(stores, self._kept, values, strict=True):
            for a, b, place in kept.overlaps(lo, hi):
                store.narrow(2, place, b - a).copy_(value.narrow(2, a - lo, b - a))

    def restore(self, until: int) -> None:
        """Show later spans the tokens before `until` only."""
        if self._alive("shown"):
            self.pages.show(self.owner, until)

    def track_gradients(self, dtype: torch.dtype) -> None:
        """Allocate gradients, zero, in at least `dtype`, for the slots that gradients reach."""
        self._grads = [
            self._tier.zeros(value.shape, torch.promote_types(value.dtype, dtype), owner=self.owner.what)
            if learns
            else None
            for value, learns in zip(self._alive("given gradients"), self._learns, strict=True)
        ]

    @property
    def tracks_gradients(self) -> bool:
        """Whether gradients of the state are wanted."""
        return self._grads is not None

    def ranges(self, key_slot: int, value_slot: int, *, since: int, until: int, reader: Store) -> list[KeyRange]:
        """Return the keys and values of the tokens `since` to `until`, with their gradient accumulators.

        Args:
            key_slot, value_slot: the slots.
            since, until: tokens; those before and after this store's are left out.
            reader: the store of the node whose span reads them.
        """
        stores = self._alive(f"read by {reader.owner}")
        if reader is self and until > self.stop:
            raise StateMisuse(f"{self.owner} is read up to token {until}, and its room ends at {self.stop}.")
        lo, hi = max(since, self.start), min(until, self.stop)
        self.pages.check_read(reader.owner, self.owner, lo, hi)
        assert self._kept[key_slot] == self._kept[value_slot], "keys and values of an attention are kept together"
        grads = self._grads or [None] * len(stores)
        found = []
        for a, b, place in self._kept[key_slot].overlaps(lo, hi):
            cut = {slot: stores[slot].narrow(2, place, b - a) for slot in (key_slot, value_slot)}
            sums = [grads[slot] for slot in (key_slot, value_slot)]
            sums = [None if grad is None else grad.narrow(2, place, b - a) for grad in sums]
            found.append(KeyRange(a, cut[key_slot], cut[value_slot], sums[0], sums[1], self._tier.staging))
        return found

    def gradients(self, lo: int, hi: int) -> list[Tensor | None]:
        """Return the accumulated gradients of tokens `lo` to `hi`, one for each slot; zero for tokens not kept.

        They are on the device.
        """
        self._alive("asked for gradients")
        assert self._grads is not None, "gradients are tracked"
        found: list[Tensor | None] = []
        for grad, kept in zip(self._grads, self._kept, strict=True):
            if grad is None:
                found.append(None)
                continue
            parts = kept.overlaps(lo, hi)
            if len(parts) == 1 and parts[0][:2] == (lo, hi):
                found.append(self._tier.load(grad.narrow(2, parts[0][2], hi - lo)))
                continue
            whole = grad.new_zeros((*grad.shape[:2], hi - lo, grad.shape[3]), device=self._tier.device)
            for a, b, place in parts:
                whole.narrow(2, a - lo, b - a).copy_(grad.narrow(2, place, b - a))
            found.append(whole)
        return found

    def release(self) -> None:
        """Give the memory back; the store can't be used afterwards."""
        self.pages.release(self.owner)
        self._values = self._grads = None
        self.boundaries = Boundaries((), start=self.start, owner=self.owner.what, tier=self._tier)
        if self._tier.staging is not None:
            self._tier.staging.forget()

    @property
    def released(self) -> bool:
        """Whether `release` was called."""
        return self._values is None

    @property
    def num_bytes(self) -> int:
        """Bytes that the store holds now."""
        held = [t for t in (*(self._values or ()), *(self._grads or ())) if t is not None]
        pages = sum(t.numel() * t.element_size() for t in held)
        return pages + self.boundaries.num_bytes

    def _alive(self, use: str) -> list[Tensor]:
        self.pages.check_held(self.owner, use)
        assert self._values is not None, "values are there until the pages are released"
        return self._values

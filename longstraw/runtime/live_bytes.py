"""Counts the bytes of live tensors, whatever the allocator does with them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longstraw import compat


class LiveBytes(compat.DispatchMode):
    """Inside the `with`: bytes of the tensors that operators made and that are still alive.

    A tensor's memory counts once, however many views it has, from the operator that made it until the last view is
    gone. Fake tensors count as real ones would. What an operator allocates for itself alone isn't seen.

    Attributes:
        peak: the most bytes alive at once since `restart`; at most `tolerance` (a fraction) too few.
        largest: the bytes of the largest single tensor.
    """

    def __init__(self, *, tolerance: float = 0.0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self.largest = 0
        self._tolerance = tolerance
        self._bytes: dict[compat.StorageReference, int] = {}
        self._total = 0  # of `_bytes`, dead ones included

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.untyped_storage()._cdata for leaf in compat.tree_leaves((args, kwargs)) if _is_dense(leaf)}
        result = func(*args, **(kwargs or {}))
        for leaf in compat.tree_leaves(result):
            if _is_dense(leaf) and leaf.untyped_storage()._cdata not in given:
                self._add(leaf.untyped_storage())
        if self._total > self.peak * (1 + self._tolerance):
            self.peak = max(self.peak, self.now())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        self._bytes[compat.StorageReference(storage)] = size
        self._total += size
        self.largest = max(self.largest, size)

    def now(self) -> int:
        """Return the bytes alive now."""
        self._bytes = {storage: size for storage, size in self._bytes.items() if not storage.expired()}
        self._total = sum(self._bytes.values())
        return self._total

    def restart(self) -> None:
        """Take the peak from here on."""
        self.peak, self.largest = self.now(), 0


def _is_dense(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout == torch.strided

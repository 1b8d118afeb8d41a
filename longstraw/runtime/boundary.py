"""Boundary states of one node of the prefix tree: what recurrences and convolutions need of the tokens before a span.

Each state is one tensor `[rows or 1, ...]` of a fixed size. They are saved at the starts of spans, where unwind starts
again, and the gradient that a span computes for the states before it is handed to the span before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longstraw.errors import StateMisuse
from longstraw.runtime.tiers import Tier

States = tuple[Tensor, ...]


class Boundaries:
    """Boundary states before some tokens of a node, and gradients of them.

    Args:
        first: the states before the node's first token; they belong to the node before.
        start: that token.
        owner: who owns the others, for messages.
        tier: where those that are kept rest.
    """

    def __init__(self, first: Sequence[Tensor], *, start: int, owner: str, tier: Tier) -> None:
        self.start, self._owner, self._tier = start, owner, tier
        self._at: dict[int, States] = {start: tuple(first)}
        self._passing: int | None = None
        self._grads: dict[int, list[Tensor | None]] = {}

    def at(self, token: int) -> States:
        """Return the states before a token; none where nothing is carried."""
        if not self._at[self.start]:
            return ()
        if token not in self._at:
            raise StateMisuse(f"{self._owner}: the boundary states before token {token} are not held.")
        return tuple(self._tier.load(state) for state in self._at[token])

    def nearest(self, token: int) -> int:
        """Return the last token up to this one whose states are held."""
        return max(at for at in self._at if at <= token)

    def save(self, token: int, states: Sequence[Tensor], *, keep: bool) -> None:
        """Hold the states before a token; without `keep` only until the next are saved."""
        if self._passing is not None:
            del self._at[self._passing]
        self._at[token] = tuple(self._tier.keep(state, owner=self._owner) for state in states)
        self._passing = None if keep else token

    def drop(self, token: int) -> None:
        """Let go of the states before a token, if held; the node's first stay."""
        if token != self.start:
            self._at.pop(token, None)
            self._passing = None if self._passing == token else self._passing

    def add_gradients(self, token: int, grads: Sequence[Tensor | None], dtype: torch.dtype) -> None:
        """Add gradients of the states before a token, in at least `dtype`; None counts as zero."""
        totals = self._grads.setdefault(token, [None] * len(grads))
        for i, grad in enumerate(grads):
            if grad is not None:
                wide = grad.to(torch.promote_types(grad.dtype, dtype))
                known = totals[i]
                totals[i] = wide if known is None else known + wide

    def take_gradients(self, token: int) -> list[Tensor | None]:
        """Return the gradients of the states before a token and let go of them; empty when there are none."""
        return self._grads.pop(token, [])

    @property
    def num_bytes(self) -> int:
        """Bytes held now, without the first states."""
        held = [t for token, states in self._at.items() if token != self.start for t in states]
        held += [grad for grads in self._grads.values() for grad in grads if grad is not None]
        return sum(t.numel() * t.element_size() for t in held)

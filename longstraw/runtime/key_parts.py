"""How the queries of a span and the keys that they see are cut into parts, each for one kernel call.

Unseen keys are left out, wholly seen ones are taken in long parts, and only parts that mix seen and unseen pairs (or
carry a bias) are short and get a mask. Queries that see one another by the lower triangle are one part without a mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from longstraw.runtime.blocks import CausalBlocks
from longstraw.runtime.tiers import Staging

QUERY_TILE = 2048  # queries of a part
MASK_TILE = 512  # keys of a part with a mask or with all its scores in memory; queries too, unless causal
CUT = 128  # mixed runs of keys no longer than this are not cut further


@dataclass(frozen=True)
class KeyRange:
    """Keys and values of a run of consecutive tokens captured before the span.

    The gradients are accumulators of the same layout, of any dtype at least as wide; None: no gradient wanted.
    With one row the range is shared by all rows. Where keys and values are one tensor (latents), it stands in both.
    With `staging` they rest on another tier than the device, and so do their gradients.
    """

    start: int
    key: Tensor  # [rows or 1, key_heads, n, key_width]
    value: Tensor  # [rows or 1, value_heads, n, value_width]
    key_grad: Tensor | None
    value_grad: Tensor | None
    staging: Staging | None = None

    def read(self, k0: int, k1: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the tokens k0 to k1 (absolute) on the device."""
        key, value = self._cut(self.key, k0, k1), self._cut(self.value, k0, k1)
        if self.staging is not None:
            key = self.staging.load(key)
            value = key if self.value is self.key else self.staging.load(value)
        return key, value

    def prefetch(self, k0: int, k1: int) -> None:
        """Begin to bring what `read` will be asked for."""
        if self.staging is not None:
            for x in (self.key,) if self.value is self.key else (self.key, self.value):
                self.staging.prefetch(self._cut(x, k0, k1))

    def accumulators(self, k0: int, k1: int) -> tuple[Tensor | None, Tensor | None]:
        """Return where the gradients of the keys and values of these tokens are summed."""
        key, value = self.key_grad, self.value_grad
        return (
            None if key is None else self._cut(key, k0, k1),
            None if value is None else self._cut(value, k0, k1),
        )

    def _cut(self, x: Tensor, k0: int, k1: int) -> Tensor:
        return x.narrow(2, k0 - self.start, k1 - k0)


class Blocks(Protocol):
    """What may be seen, and with what bias, as a function of absolute token coordinates; bound to the rows that run."""

    def verdict(self, q0: int, q1: int, k0: int, k1: int) -> str:
        """ "all": every pair is seen with zero bias; "none": no pair is seen; "mixed": anything else."""

    def tensor(self, q0: int, q1: int, k0: int, k1: int) -> Tensor:
        """[rows|1, heads|1, q1-q0, k1-k0], bool (True = seen) or float (added to the scores)."""


class KeyPart(NamedTuple):
    """Keys k0..k1 (absolute) of one source; kind is "all", "mixed" or "causal"."""

    source: int  # index into the earlier ranges, or -1: the span's own keys
    k0: int
    k1: int
    kind: str


class QueryTile(NamedTuple):
    """Queries q0..q1 (absolute) and what they see."""

    q0: int
    q1: int
    parts: tuple[KeyPart, ...]


Plans = dict[Any, tuple[QueryTile, ...]]
"""How spans were cut, by what it depends on."""


def cut(
    blocks: Blocks,
    start: int,
    tokens: int,
    earlier: Sequence[tuple[int, int]],
    *,
    key_tile: int,
    builds_scores: bool,
) -> tuple[QueryTile, ...]:
    """Cut a span's queries into tiles, and the keys that each tile sees into parts.

    Args:
        blocks: what may be seen.
        start, tokens: the span.
        earlier: first and last token + 1 of each range of keys before it.
        key_tile: keys of a part without a mask, at most.
        builds_scores: whether the kernel holds all scores of a part in memory.
    """
    return tuple(_tiles(blocks, start, start + tokens, earlier, key_tile, builds_scores))


def _tiles(
    blocks: Blocks, start: int, end: int, earlier: Sequence[tuple[int, int]], key_tile: int, builds_scores: bool
) -> Iterator[QueryTile]:
    sources = [(i, k0, k1) for i, (k0, k1) in enumerate(earlier)]
    tile = MASK_TILE if builds_scores else QUERY_TILE
    key_tile = min(key_tile, MASK_TILE) if builds_scores else key_tile

    def parts(q0: int, q1: int, spans: list[tuple[int, int, int]]) -> Iterator[KeyPart]:
        for source, k0, k1 in spans:
            for kind, a, b in _runs(blocks, q0, q1, k0, k1):
                step = key_tile if kind == "all" else min(key_tile, MASK_TILE)
                for c in range(a, b, step):
                    yield KeyPart(source, c, min(c + step, b), kind)

    for q0 in range(start, end, tile):
        q1 = min(q0 + tile, end)
        if not builds_scores and _is_causal(blocks, q0, q1):
            spans = [*sources, (-1, start, q0), (-1, q1, end)]
            yield QueryTile(q0, q1, (*parts(q0, q1, spans), KeyPart(-1, q0, q1, "causal")))
            continue
        for p0 in range(q0, q1, MASK_TILE):
            p1 = min(p0 + MASK_TILE, q1)
            yield QueryTile(p0, p1, tuple(parts(p0, p1, [*sources, (-1, start, end)])))


def _is_causal(blocks: Blocks, q0: int, q1: int) -> bool:
    """Whether tokens q0..q1 see one another by the lower triangle, without bias; looked at in small squares."""
    if blocks.verdict(q0, q1, q0, q1) != "mixed":
        return False
    if isinstance(blocks, CausalBlocks):
        return True
    spans = [(a, min(a + MASK_TILE, q1)) for a in range(q0, q1, MASK_TILE)]
    squares = sorted(((q, k) for q in spans for k in spans), key=lambda square: square[0] != square[1])
    return all(_is_causal_square(blocks, *q, *k) for q, k in squares)


def _is_causal_square(blocks: Blocks, q0: int, q1: int, k0: int, k1: int) -> bool:
    verdict = blocks.verdict(q0, q1, k0, k1)
    if q0 != k0 and verdict != "mixed":
        return verdict == ("all" if k0 < q0 else "none")
    if blocks.tensor(q0, q0 + 1, k0, k0 + 1).dtype != torch.bool:
        return False
    seen = blocks.tensor(q0, q1, k0, k1)
    return bool((seen == torch.ones_like(seen[0, 0]).tril(q0 - k0)).all())


def _runs(blocks: Blocks, q0: int, q1: int, k0: int, k1: int) -> list[tuple[str, int, int]]:
    """The longest runs of keys with one verdict, "none" left out; cut points are multiples of CUT."""
    runs: list[tuple[str, int, int]] = []
    todo = [(k0, k1)] if k0 < k1 else []
    while todo:
        a, b = todo.pop()
        kind = blocks.verdict(q0, q1, a, b)
        middle = (a + b + CUT) // (2 * CUT) * CUT
        if kind == "mixed" and b - a > CUT and a < middle < b:
            todo += [(middle, b), (a, middle)]
        elif kind != "none":
            if runs and runs[-1][0] == kind and runs[-1][2] == a:
                a = runs.pop()[1]
            runs.append((kind, a, b))
    return runs

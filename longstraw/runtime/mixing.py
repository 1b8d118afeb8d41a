"""What a span's graphs call for ops that read other tokens: attention to the state before the span, and selection.

Each attention takes one of four forms, all exact: over keys and values; over keys and values built from latents; over
latents themselves (absorbed); over the latents or keys that were selected (gathered). The one with fewest products is
taken.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from longstraw.runtime import attention, selection
from longstraw.runtime.blocks import Blocks
from longstraw.runtime.key_parts import KeyRange, Plans
from longstraw.runtime.leaves import Where
from longstraw.runtime.visibility import first_seen
from longstraw.stages import Expansion, Site, Stateful

GATHER_COST = 2
"""How many times a product with a gathered key costs one with a key in place."""


class Mixing:
    """What the graphs of one span call.

    Args:
        branch: its attentions and selections.
        blocks: what each of them may see.
        where: the span.
        row_tokens: tokens of a row.
    """

    def __init__(self, branch: Stateful, blocks: Sequence[Blocks], where: Where, row_tokens: int) -> None:
        self._sites, self._choosers, self._where = branch.sites, branch.choosers, where
        self._blocks, self._row_tokens = blocks, row_tokens
        self._since: dict[int, int] = {}
        self._plans: Plans = {}

    def attend(
        self,
        site: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_inputs: tuple[Tensor, ...],
        sink: Tensor | None,
        expand_inputs: tuple[Any, ...],
        selected: Tensor | None,
    ) -> Tensor:
        known = self._sites[site]
        blocks = self._blocks[site]
        earlier = self._earlier(known.key_slot, known.value_slot, blocks)
        plans = self._plans
        if selected is not None and self._where.hi > selected.shape[2]:  # else every key that is seen was selected
            if self._gathers(known, query, key, blocks, selected.shape[2]):
                gather = functools.partial(
                    selection.attend_to_selected,
                    start=self._where.lo,
                    earlier=earlier,
                    selected=selected,
                    scale=known.scale,
                )
                if known.expansion is None:
                    return gather(query, key, value)
                latent_width = key.shape[3]
                return in_latent_space(
                    known.expansion, expand_inputs, query, latent_width, lambda q: gather(q, key, key)
                )
            under = selection.SelectedBlocks(blocks, selected, self._where.lo)
            if known.finite_selection and blocks is not self._blocks[len(self._sites) + (known.chooser or 0)]:
                under.check_some_key(self._where.lo, self._where.hi, where=known.line)
            blocks, plans = under, {}
        score, expansion = known.score, known.expansion
        attend = functools.partial(
            attention.attend,
            start=self._where.lo,
            earlier=earlier,
            blocks=blocks,
            scale=known.scale,
            score=None if score is None else lambda raw, q0, q1, k0, k1, *inputs: score(raw, *inputs),
            score_inputs=score_inputs,
            sink=sink,
            plans=plans,
        )
        if expansion is None:
            return attend(query, key, value)
        if query.shape[0] * query.shape[2] < expansion.absorbed_below(known.heads, key.shape[3]):
            return in_latent_space(expansion, expand_inputs, query, key.shape[3], lambda q: attend(q, key, key))
        sizes = (expansion.key_heads, expansion.key_width, expansion.value_heads, expansion.value_width)
        return attend(query, key, key, build=attention.Build(expansion.module, expand_inputs, *sizes))

    def _earlier(self, key_slot: int, value_slot: int, blocks: Blocks) -> list[KeyRange]:
        """Return what the span's queries may see of two slots' earlier tokens."""
        if id(blocks) not in self._since:
            self._since[id(blocks)] = first_seen(blocks, self._where.lo, self._where.hi, 0, self._where.lo)
        seen = {"since": self._since[id(blocks)], "until": self._where.lo}
        path = self._where.path
        return [part for store in path for part in store.ranges(key_slot, value_slot, **seen, reader=path[-1])]

    def _gathers(self, site: Site, query: Tensor, key: Tensor, blocks: Blocks, k: int) -> bool:
        """Return whether attending to what was gathered is possible, and takes less than attending under a mask."""
        assert site.chooser is not None, "a selection was made"
        expansion, lo = site.expansion, self._where.lo
        same_mask = blocks is self._blocks[len(self._sites) + site.chooser]
        plain = site.score is None and (expansion is None or expansion.linear)
        if not same_mask or not plain or blocks.tensor(lo, lo + 1, lo, lo + 1).dtype != torch.bool:
            return False
        if expansion is None:
            return GATHER_COST * k < self._where.hi
        widths = expansion.key_width + expansion.value_width
        building = expansion.building(key.shape[3]) // (query.shape[0] * query.shape[2])
        return GATHER_COST * k * site.heads * 2 * key.shape[3] < self._where.hi * (site.heads * widths + building)

    def choose(
        self, chooser: int, queries: tuple[Tensor, ...], keys: tuple[Tensor, ...], others: tuple[Tensor, ...]
    ) -> Tensor:
        known, lo, hi = self._choosers[chooser], self._where.lo, self._where.hi
        if hi <= known.k:  # every query selects all that it sees: nothing asks which
            return torch.full((len(self._where.rows), hi - lo, known.k), -1, device=queries[0].device)
        blocks = self._blocks[len(self._sites) + chooser]
        ranges = [self._earlier(slot, slot, blocks) for slot in known.key_slots]
        pieces = [
            selection.Piece(parts[0].start, tuple(part.key for part in parts), parts[0].staging)
            for parts in zip(*ranges, strict=True)
        ]
        candidates = selection.Candidates(known, queries, others, [*pieces, selection.Piece(lo, keys)], blocks, lo)
        return selection.choose(candidates, tokens=hi - lo, row_tokens=self._row_tokens)


def in_latent_space(
    expansion: Expansion, inputs: tuple[Any, ...], query: Tensor, width: int, attend: Callable[[Tensor], Tensor]
) -> Tensor:
    """Attend to latents themselves (the absorbed form of arXiv 2405.04434, section 2.1.2); differentiable.

    Keys and values are linear in the latents c: `k = M c`, `v = N c` for each head. So `q k = (M^T q) c`, and the
    weighted sum of values is N times that of the latents. M and N are what the expansion makes of unit vectors.

    Args:
        expansion: a linear one.
        inputs: what it reads beside latents.
        query: `[rows, heads, tokens, key_width]`.
        width: of the latents.
        attend: from queries `[rows, heads, tokens, latent width]` to latents.

    Returns:
        `[rows, heads, tokens, value_width]`.
    """
    unit = torch.eye(width, dtype=query.dtype, device=query.device)[None, None]
    keys, values = expansion.module(1, width, *inputs, unit)  # [1, heads, width, key_width or value_width]
    taken = query.unflatten(1, (keys.shape[1], -1)) @ keys[0][:, None].mT
    out = attend(taken.flatten(1, 2))
    return (out.unflatten(1, (values.shape[1], -1)) @ values[0][:, None]).flatten(1, 2)

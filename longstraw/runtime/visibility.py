"""What the attentions of a branch may see, bound to the rows of one step: masks, and what of the state is ever seen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from longstraw.blocks import HIDING, UNSEEN
from longstraw.errors import UnsupportedMask
from longstraw.runtime.blocks import Blocks, CausalBlocks, EverySeen, bind, both
from longstraw.runtime.leaves import Rows
from longstraw.runtime.state import Kept, merged
from longstraw.stages import Chooser, Site, Stateful

_CHECKED_KEYS = 2048
_CHECKED_QUERIES = 256
_BOUND_ROWS = 8
"""Sets of rows whose masks are held at once: those on the way from the root to a leaf."""


def first_seen(blocks: Blocks, q0: int, q1: int, k0: int, k1: int) -> int:
    """Return the first of the keys `k0` to `k1` from which on any of the queries may see one (`k1` when none does)."""
    if q0 >= q1 or k0 >= k1 or blocks.verdict(q0, q1, k0, k0 + 1) != "none":
        return k0
    unseen, seen = k0 + 1, k1 + 1  # keys k0..unseen are not seen; k0..seen-1 may be
    while seen - unseen > 1:
        middle = (unseen + seen) // 2
        if blocks.verdict(q0, q1, k0, middle) == "none":
            unseen = middle
        else:
            seen = middle
    return unseen


def _later(blocks: Blocks, lo: int, hi: int, stop: int, *, least: float) -> Iterator[Tensor]:
    """Yield bools, one of which is true if any query `lo` to `hi` sees a key after itself and before `stop`."""
    if blocks.verdict(lo, hi, hi, stop) != "none":
        for k in range(hi, stop, _CHECKED_KEYS):
            yield _seen(blocks, lo, hi, k, min(k + _CHECKED_KEYS, stop), least=least).any()
    if hi - lo > _CHECKED_QUERIES:
        middle = (lo + hi) // 2
        yield from _later(blocks, lo, middle, hi, least=least)
        yield from _later(blocks, middle, hi, hi, least=least)
    elif hi - lo > 1:
        yield _seen(blocks, lo, hi, lo, hi, least=least).triu(1).any()


def _seen(blocks: Blocks, q0: int, q1: int, k0: int, k1: int, *, least: float) -> Tensor:
    """Return which queries see which keys: those with a bias above `least`."""
    block = blocks.tensor(q0, q1, k0, k1)
    return block if block.dtype == torch.bool else block > least


class Visibility:
    """The masks of a branch with the inputs of one step.

    Args:
        branch: its attentions and block programs.
        values: what the programs read, by node of the step.
    """

    def __init__(self, branch: Stateful, values: Mapping[fx.Node, Any]) -> None:
        self._branch = branch
        self._values = {  # no gradient flows through what may be seen, see insert_state
            node: value.detach() if isinstance(value, Tensor) else value
            for node, value in ((node, values[node]) for program in branch.masks for node in program.inputs)
        }
        self._blocks: dict[Rows, list[Blocks]] = {}
        self._factors_checked = False

    def blocks(self, rows: Rows) -> list[Blocks]:
        """Return what each attention may see, and then what each selection may, for these rows."""
        if rows not in self._blocks:
            while len(self._blocks) >= _BOUND_ROWS:
                del self._blocks[next(iter(self._blocks))]
            neighbours = list(rows) == list(range(rows[0], rows[-1] + 1))  # read in place, not copied
            chosen = slice(rows[0], rows[-1] + 1) if neighbours else list(rows)
            selecting = {index for chooser in self._branch.choosers for index in chooser.masks}
            programs = [
                bind(
                    program,
                    [self._values[node] for node in program.inputs],
                    chosen,
                    unseen=UNSEEN if index in selecting else HIDING,
                )
                for index, program in enumerate(self._branch.masks)
            ]
            table: list[Blocks] = []
            for site in self._readers():
                causal = isinstance(site, Site) and site.causal
                found: Blocks = CausalBlocks() if causal else EverySeen()
                for i, index in enumerate(site.masks):
                    found = programs[index] if i == 0 and not causal else both(found, programs[index])
                table.append(found)
            self._blocks[rows] = table
        return self._blocks[rows]

    def _readers(self) -> list[Site | Chooser]:
        return [*self._branch.sites, *self._branch.choosers]

    def check(self, rows: Rows, lo: int, hi: int, stop: int) -> None:
        """Refuse masks that let a query of a span see a token after it, or see nothing where that has no meaning.

        Later tokens of the span itself count too: what needs no gradient is left out when the span runs again.

        Args:
            rows: that run.
            lo, hi: the span.
            stop: the end of the rows, also of tokens that no result needs.
        """
        if not self._factors_checked:
            self._check_factors()
            self._factors_checked = True
        found = list(zip(self._readers(), self.blocks(rows), strict=True))
        pairs = {id(b): (s, b) for s, b in reversed(found)}  # of a selection and an attention, the attention
        for site, blocks in pairs.values():
            if isinstance(site, Site) and any(self._branch.finite[index] for index in site.masks):
                self._check_some_key(site, blocks, lo, hi)
            least = HIDING if isinstance(site, Site) else UNSEEN
            later = () if isinstance(site, Site) and site.causal else tuple(_later(blocks, lo, hi, stop, least=least))
            if later and bool(torch.stack(later).any()):
                raise UnsupportedMask(
                    "Attention lets a token see later tokens: the model is not causal.",
                    where=site.line,
                    remedy="longstraw needs causal attention: pass a causal mask, or set the model's config to causal. "
                    f"A mask that is added to scores must be -inf or at most {HIDING:g} for later tokens; one that is "
                    "added to the scores of a selection, -inf or the lowest number of its dtype.",
                )

    def _check_factors(self) -> None:
        """Refuse factors of scores that stand for masks and have other values than 0 and 1."""
        for site in self._readers():
            for program in (self._branch.masks[index] for index in site.masks):
                for value in (self._values[program.inputs[index]] for index in program.zero_or_one):
                    if not bool(((value == 0) | (value == 1)).all()):
                        raise UnsupportedMask(
                            "Scores are multiplied by a mask that has other values than 0 and 1.",
                            where=site.line,
                            remedy="Make it 1 for the keys that a query sees and 0 for all others, or mask the scores "
                            "with `masked_fill`.",
                        )

    def _check_some_key(self, site: Site, blocks: Blocks, lo: int, hi: int) -> None:
        least = HIDING / 2  # a bias nearly as low as that of unseen keys is none of a key that is surely seen
        seen: Tensor | None = None
        for k in range(hi, 0, -_CHECKED_KEYS):
            found = _seen(blocks, lo, hi, max(0, k - _CHECKED_KEYS), k, least=least).any(-1)
            seen = found if seen is None else seen | found
            if bool(seen.all()):
                return
        raise UnsupportedMask(
            "A token may see no token at all, and the mask gives unseen ones a finite score: it would attend to all "
            "tokens of its row, later ones too.",
            where=site.line,
            remedy="Left-padded rows have such tokens. Pad on the right, or use the model's `sdpa` attention "
            "implementation.",
        )

    def kept(self, rows: Rows, spans: Sequence[tuple[int, int]], until: int, stop: int) -> list[Kept]:
        """Return for each slot which tokens later tokens can see.

        Args:
            rows: the rows that read the state.
            spans: the runs of tokens that are captured at once.
            until: end of the last of them that is kept.
            stop: end of the rows.
        """
        groups = list(range(len(self._branch.slots)))  # slots that one attention reads are kept together
        for site in self._branch.sites * 2:
            groups[site.key_slot] = groups[site.value_slot] = min(groups[site.key_slot], groups[site.value_slot])
        runs: dict[int, list[tuple[int, int]]] = {group: [] for group in groups}
        readers: dict[int, dict[int, Blocks]] = {group: {} for group in groups}
        table = self.blocks(rows)
        for site, blocks in zip(self._branch.sites, table, strict=False):
            readers[groups[site.key_slot]][id(blocks)] = blocks
        for chooser, blocks in zip(self._branch.choosers, table[len(self._branch.sites) :], strict=True):
            for slot in chooser.key_slots:
                readers[groups[slot]][id(blocks)] = blocks
        for lo, hi in spans:
            first: dict[int, int] = {}
            for group, found in readers.items():
                for key, blocks in found.items():
                    if key not in first:
                        first[key] = first_seen(blocks, hi, stop, lo, hi)
                runs[group].append((min((first[key] for key in found), default=lo), min(hi, until)))
        return [merged(runs[group]) for group in groups]

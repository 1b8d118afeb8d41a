"""Sparse attention on a span: select keys by their scores, attend to those that were selected.

`choose` streams over the keys: a tile of scores at a time, merged into the best so far. No matrix of all pairs is
built. Scores that tie at the k-th place are settled as `torch.topk` settles them on the whole row, by asking it.
`attend_to_selected` gathers what each query selected, so its cost grows with k and not with the number of tokens;
`SelectedBlocks` is the same as a mask, cheaper where few keys are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longstraw import compat
from longstraw.blocks import UNSEEN
from longstraw.errors import UnsupportedMask
from longstraw.runtime.blocks import Blocks, Verdict
from longstraw.runtime.key_parts import KeyRange
from longstraw.runtime.merge import accumulate_dtype
from longstraw.runtime.tiers import Staging
from longstraw.stages import Chooser

TILE_BYTES = 8 << 20
"""What a tile of scores, and the keys that a tile of queries selected, may take."""
QUERIES = 256  # of a tile of scores


# --- choosing ---------------------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """Key-side values of the tokens from `start` on, each `[rows or 1, heads, tokens, width]`.

    With `staging` they rest on another tier than the device.
    """

    start: int
    values: tuple[Tensor, ...]
    staging: Staging | None = None

    def read(self, k0: int, k1: int) -> list[Tensor]:
        """Return the values of the tokens k0 to k1 (absolute) on the device."""
        parts = [x.narrow(2, k0 - self.start, k1 - k0) for x in self.values]
        return parts if self.staging is None else [self.staging.load(part) for part in parts]


@dataclass(frozen=True)
class Candidates:
    """What the queries of a span select from.

    Attributes:
        chooser: the score function, and k.
        queries: query-side values of the span.
        others: what else the function reads.
        pieces: key-side values of all tokens that may be seen, in order, the span's own last.
        blocks: which of them may be selected.
        start: first token of the span.
    """

    chooser: Chooser
    queries: Sequence[Tensor]
    others: Sequence[Tensor]
    pieces: Sequence[Piece]
    blocks: Blocks
    start: int


def choose(candidates: Candidates, *, tokens: int, row_tokens: int) -> Tensor:
    """Select keys for the queries of a span.

    Args:
        candidates: what they select from.
        tokens: of the span.
        row_tokens: of a whole row.

    Returns:
        `[rows, tokens, k]`, int64, in row coordinates; -1 where fewer keys may be selected.
    """
    start, stop = candidates.start, candidates.start + tokens
    tiles = [_Tile(candidates, q0, min(q0 + QUERIES, stop)) for q0 in range(start, stop, QUERIES)]
    return torch.cat([tile.best(row_tokens) for tile in tiles], 1)


class _Tile:
    """The scores of the queries q0 to q1 of a span."""

    def __init__(self, candidates: Candidates, q0: int, q1: int) -> None:
        self.candidates, self.chooser, self.q0, self.q1 = candidates, candidates.chooser, q0, q1
        cut = zip(candidates.queries, self.chooser.query_dims, strict=True)
        self.queries = [x.narrow(d, q0 - candidates.start, q1 - q0) for x, d in cut]
        rows = self.queries[0].shape[0]
        pair = rows * (q1 - q0) * self.chooser.numbers_per_pair * self.queries[0].element_size()
        self.step = max(64, TILE_BYTES // max(1, pair))

    def scores(self) -> Iterator[tuple[int, Tensor]]:
        """Yield `(first key, scores [rows, queries, keys])`, runs of keys that none may see left out."""
        blocks = self.candidates.blocks
        for piece in self.candidates.pieces:
            stop = piece.start + piece.values[0].shape[2]
            for k0 in range(piece.start, stop, self.step):
                k1 = min(k0 + self.step, stop)
                verdict = blocks.verdict(self.q0, self.q1, k0, k1)
                if verdict == "none":
                    continue
                keys = piece.read(k0, k1)
                scores = self.chooser.score(*self.queries, *keys, *self.candidates.others)
                if verdict == "mixed":
                    block = blocks.tensor(self.q0, self.q1, k0, k1)[:, 0]
                    seen = block.dtype == torch.bool
                    scores = scores.masked_fill(~block, -torch.inf) if seen else scores + block
                yield k0, scores

    def best(self, row_tokens: int) -> Tensor:
        """Return the selection, `[rows, queries, k]`."""
        k = self.chooser.k
        values, places = None, None
        for k0, scores in self.scores():
            at = torch.arange(k0, k0 + scores.shape[2], device=scores.device).expand(scores.shape)
            values = scores if values is None else torch.cat([values, scores], 2)
            places = at if places is None else torch.cat([places, at], 2)
            values, order = values.topk(min(k + 1, values.shape[2]), 2)  # one more: does the k-th tie?
            places = places.gather(2, order)
        if values is None or places is None:
            return torch.full((self.queries[0].shape[0], self.q1 - self.q0, k), -1, device=self.queries[0].device)
        tied = values[..., -1:] == values[..., -2:-1] if values.shape[2] > k else values[..., :1] > torch.inf
        tied &= values[..., -1:] > UNSEEN
        tied |= values.isnan().any(-1, keepdim=True)  # the largest of all to `topk`
        found = places.masked_fill(values <= UNSEEN, -1)[..., :k]
        if found.shape[2] < k:
            found = torch.nn.functional.pad(found, (0, k - found.shape[2]), value=-1)
        return torch.where(tied, self._of_whole_rows(row_tokens), found) if compat.may_hold(tied.any()) else found

    def _of_whole_rows(self, row_tokens: int) -> Tensor:
        """Return what `topk` selects from whole rows of scores, a few queries at a time."""
        rows, found = self.queries[0].shape[0], []
        few = max(1, TILE_BYTES // (8 * rows * row_tokens))
        for q0 in range(self.q0, self.q1, few):
            q1 = min(q0 + few, self.q1)
            tile = _Tile(self.candidates, q0, q1)
            whole: Tensor | None = None
            for k0, scores in tile.scores():
                if whole is None:
                    whole = scores.new_full((rows, q1 - q0, row_tokens), -torch.inf)
                # What stands for "not seen" may be finite, and is the same for all such keys in a whole row.
                whole[..., k0 : k0 + scores.shape[2]] = scores.masked_fill(scores <= UNSEEN, -torch.inf)
            if whole is None:
                found.append(torch.full((rows, q1 - q0, self.chooser.k), -1, device=self.queries[0].device))
                continue
            values, places = whole.topk(self.chooser.k, 2)
            found.append(places.masked_fill(values <= UNSEEN, -1))
        return torch.cat(found, 1)


class SelectedBlocks:
    """What a mask lets a query see, and was selected for it.

    Args:
        blocks: the mask.
        selected: `[rows, tokens, k]`, for the tokens from `start` on.
        start: first of these tokens.
    """

    def __init__(self, blocks: Blocks, selected: Tensor, start: int) -> None:
        self.blocks, self.selected, self.start = blocks, selected, start

    @property
    def device(self) -> torch.device:
        """Where its tensors live."""
        return self.blocks.device

    def verdict(self, q0: int, q1: int, k0: int, k1: int) -> Verdict:
        """As `Blocks.verdict`: queries that see no more than k keys selected them all."""
        verdict = self.blocks.verdict(q0, q1, k0, k1)
        return verdict if verdict == "none" or q1 <= self.selected.shape[2] else "mixed"

    def tensor(self, q0: int, q1: int, k0: int, k1: int) -> Tensor:
        """As `Blocks.tensor`."""
        places = self.selected[:, q0 - self.start : q1 - self.start]
        inside = (places >= k0) & (places < k1)
        chosen = torch.zeros(*places.shape[:2], k1 - k0 + 1, dtype=torch.bool, device=places.device)
        chosen.scatter_(2, torch.where(inside, places - k0, k1 - k0), True)
        block = self.blocks.tensor(q0, q1, k0, k1)
        seen = chosen[:, None, :, : k1 - k0]
        return block & seen if block.dtype == torch.bool else block.masked_fill(~seen, -torch.inf)

    def check_some_key(self, lo: int, hi: int, *, where: str) -> None:
        """Refuse a query that sees none of the keys selected for it, where it would attend to all others then."""
        for q0 in range(lo, hi, QUERIES):
            q1 = min(q0 + QUERIES, hi)
            seen = torch.zeros((), dtype=torch.bool, device=self.selected.device)
            for k0 in range(0, hi, 4 * QUERIES):
                block = self.tensor(q0, q1, k0, min(k0 + 4 * QUERIES, hi))
                seen = seen | (block if block.dtype == torch.bool else block > UNSEEN).any(-1)
            if not bool(seen.all()):
                raise UnsupportedMask(
                    "A token sees none of the keys that were selected for it, and its mask gives unseen keys a finite "
                    "score: it would attend to all keys, later ones too.",
                    where=where,
                    remedy="Select among the keys that the attention's mask lets a token see, or fill masks with -inf.",
                )


# --- attending --------------------------------------------------------------------------------------------------------


def attend_to_selected(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    start: int,
    earlier: Sequence[KeyRange],
    selected: Tensor,
    scale: float,
) -> Tensor:
    """Softmax attention of a span to the keys that each query selected: `[rows, heads, tokens, value_width]`.

    Args:
        query: `[rows, heads, tokens, key_width]`.
        key, value: the span's own, `[rows, key_heads, tokens, width]`; one tensor where they are latents.
        start: first token of the span.
        earlier: keys and values of earlier tokens, with accumulators for their gradients.
        selected: `[rows, tokens, k]`, in row coordinates; -1: none.
        scale: factor on the products.
    """
    with compat.without_autocast(query.device.type):  # dtypes are chosen here
        out: Tensor = _Gathered.apply(query, key, value, (start, tuple(earlier), scale), selected)  # type: ignore[no-untyped-call]
    return out


class _Place(NamedTuple):
    """Where a part of the selected keys is found, and where it goes in the gathered ones."""

    source: int  # index into the earlier ranges, or -1: the span's own keys
    row: Tensor
    at: Tensor  # place among the keys of the source
    entry: Tensor  # place among tokens * k gathered keys


def _places(selected: Tensor, start: int, tokens: int, earlier: Sequence[KeyRange]) -> list[_Place]:
    flat = selected.flatten(1)
    found = []
    spans = [(i, part.start, part.start + part.key.shape[2]) for i, part in enumerate(earlier)]
    for source, lo, hi in (*spans, (-1, start, start + tokens)):
        row, entry = compat.true_places((flat >= lo) & (flat < hi))
        if row.numel():
            found.append(_Place(source, row, flat[row, entry] - lo, entry))
    return found


def _gather(places: Sequence[_Place], own: Tensor, earlier: Sequence[Tensor], rows: int, entries: int) -> Tensor:
    """Return the selected keys, `[rows, entries, heads, width]`, zero where none was selected."""
    found = own.new_zeros(rows, entries, own.shape[1], own.shape[3])
    for place in places:
        source = (own if place.source < 0 else earlier[place.source]).transpose(1, 2)
        row = place.row if source.shape[0] > 1 else torch.zeros_like(place.row)
        picked = source[row.to(source.device), place.at.to(source.device)]
        found[place.row, place.entry] = picked.to(own.device)
    return found


def _scatter(places: Sequence[_Place], grad: Tensor, own: Tensor, earlier: Sequence[Tensor | None]) -> None:
    """Add gradients of gathered keys to those of the keys themselves."""
    for place in places:
        target = own if place.source < 0 else earlier[place.source]
        if target is None:
            continue
        target, more = target.transpose(1, 2), grad[place.row, place.entry].to(target.dtype)
        for row in range(target.shape[0]):
            here = slice(None) if target.shape[0] == 1 else compat.true_places(place.row == row)[0]
            target[row].index_add_(0, place.at[here].to(target.device), more[here].to(target.device))


def _weighted(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Attend from `[rows, heads, t, w]` to gathered `[rows, t * k, key_heads, w]`; `seen` is `[rows, t, k]`."""
    wide = accumulate_dtype(query.dtype)
    tokens = query.shape[2]
    key, value = (x.unflatten(1, (tokens, -1)).transpose(2, 3).to(wide) for x in (key, value))  # [rows, t, heads, k, w]
    grouped = query.to(wide).transpose(1, 2).unflatten(2, (key.shape[2], -1))  # [rows, t, key_heads, group, w]
    scores = (grouped @ key.mT) * scale
    scores = scores.masked_fill(~seen[:, :, None, None], -torch.inf)
    none = ~seen.any(-1)[:, :, None, None, None]
    weights = torch.softmax(scores.masked_fill(none, 0), -1).masked_fill(none, 0)
    out = (weights.flatten(2, 3).unflatten(2, (value.shape[2], -1)) @ value).flatten(2, 3)
    return out.transpose(1, 2)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: Any, selected: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, value, selected)
        ctx.call = call
        start, earlier, scale = call
        out = query.new_empty(*query.shape[:3], value.shape[3])
        for lo, hi in _tiles(query, key, value, selected):
            chosen = selected[:, lo:hi]
            keys, values, _ = _gathered(chosen, start, key, value, earlier)
            out[:, :, lo:hi] = _weighted(query[:, :, lo:hi], keys, values, chosen >= 0, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, selected = ctx.saved_tensors
        start, earlier, scale = ctx.call
        wide = accumulate_dtype(query.dtype)
        grad_query = torch.empty_like(query)
        grad_key = torch.zeros_like(key, dtype=wide)
        grad_value = grad_key if value is key else torch.zeros_like(value, dtype=wide)
        one = value is key
        for lo, hi in _tiles(query, key, value, selected):
            chosen = selected[:, lo:hi]
            keys, values, places = _gathered(chosen, start, key, value, earlier)
            with torch.enable_grad():
                q, k = query[:, :, lo:hi].detach().requires_grad_(), keys.requires_grad_()
                v = k if one else values.requires_grad_()
                out = _weighted(q, k, v, chosen >= 0, scale)
            wanted = [q, k] if one else [q, k, v]
            found = torch.autograd.grad(out, wanted, grad_out[:, :, lo:hi].to(out.dtype))
            grad_query[:, :, lo:hi] = found[0]
            _scatter(places, found[1], grad_key, [part.key_grad for part in earlier])
            if not one:
                _scatter(places, found[2], grad_value, [part.value_grad for part in earlier])
        return grad_query, grad_key.to(key.dtype), None if one else grad_value.to(value.dtype), None, None


def _gathered(
    chosen: Tensor, start: int, key: Tensor, value: Tensor, earlier: Sequence[KeyRange]
) -> tuple[Tensor, Tensor, list[_Place]]:
    rows, entries = chosen.shape[0], chosen.shape[1] * chosen.shape[2]
    places = _places(chosen, start, key.shape[2], earlier)
    keys = _gather(places, key, [part.key for part in earlier], rows, entries)
    if value is key:
        return keys, keys, places
    return keys, _gather(places, value, [part.value for part in earlier], rows, entries), places


def _tiles(query: Tensor, key: Tensor, value: Tensor, selected: Tensor) -> list[tuple[int, int]]:
    """Return runs of queries, as many as the keys that they selected leave room for."""
    rows, tokens, k = selected.shape
    heads = query.shape[1]
    per_query = rows * k * (key.shape[1] * key.shape[3] + value.shape[1] * value.shape[3] + 2 * heads)
    size = max(1, TILE_BYTES // (per_query * accumulate_dtype(query.dtype).itemsize))
    return [(lo, min(lo + size, tokens)) for lo in range(0, tokens, size)]

"""Selection over spans against the dense one: ties, masks, and gradients of what was gathered."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, fx

from longstraw.runtime import selection
from longstraw.runtime.blocks import CausalBlocks
from longstraw.runtime.key_parts import KeyRange
from longstraw.stages import Chooser

ROWS, TOKENS, HEADS = 2, 41, 3


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def score(query: Tensor, weights: Tensor, key: Tensor) -> Tensor:
    """An indexer: `sum_h w_h relu(q_h k)`."""
    products = torch.relu(query @ key.squeeze(1).mT.unsqueeze(1))
    return (weights.unsqueeze(-2) @ products).squeeze(-2)


def chooser(k: int) -> Chooser:
    graph = fx.symbolic_trace(score)
    return Chooser((0,), (), k, graph, (1, 1), HEADS, "", "")


def indexer(*, ties: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    query, weights, key = (
        random(ROWS, TOKENS, HEADS, 4),
        random(ROWS, TOKENS, HEADS, seed=1),
        random(ROWS, 1, TOKENS, 4),
    )
    if ties:  # few values, so that whole runs of scores are equal, zero among them
        query, weights, key = query.sign(), weights.abs().ceil(), key.sign()
    return query, weights, key


def dense(query: Tensor, weights: Tensor, key: Tensor, k: int) -> Tensor:
    scores = score(query, weights, key)
    later = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    values, places = scores.masked_fill(later, -torch.inf).topk(k, -1)
    return places.masked_fill(values == -torch.inf, -1)


class FiniteBlocks(CausalBlocks):
    """Adds to scores of unseen keys the lowest number that there is, and not minus infinity."""

    def tensor(self, q0: int, q1: int, k0: int, k1: int) -> Tensor:
        seen = super().tensor(q0, q1, k0, k1)
        return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)


def spans(
    cuts: list[int], k: int, query: Tensor, weights: Tensor, key: Tensor, blocks: type[CausalBlocks] = CausalBlocks
) -> Tensor:
    found = []
    for lo, hi in itertools.pairwise([0, *cuts, TOKENS]):
        pieces = [selection.Piece(a, (key[:, :, a:b],)) for a, b in ((0, lo // 2), (lo // 2, lo), (lo, hi)) if a < b]
        queries = [query[:, lo:hi], weights[:, lo:hi]]
        candidates = selection.Candidates(chooser(k), queries, (), pieces, blocks(), lo)
        found.append(selection.choose(candidates, tokens=hi - lo, row_tokens=TOKENS))
    return torch.cat(found, 1)


@pytest.mark.parametrize("tile", [(256, 1 << 25), (3, 1)], ids=["whole", "small tiles"])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("k", [1, 5, 40])
def test_choose_equals_topk_of_whole_rows(
    monkeypatch: pytest.MonkeyPatch, k: int, ties: bool, tile: tuple[int, int]
) -> None:
    monkeypatch.setattr(selection, "QUERIES", tile[0])
    monkeypatch.setattr(selection, "TILE_BYTES", tile[1])
    inputs = indexer(ties=ties)
    expected = dense(*inputs, k).sort(-1).values
    for cuts in ([], [1], [7, 8, 30], list(range(5, TOKENS, 5))):
        for blocks in (CausalBlocks, FiniteBlocks):
            assert torch.equal(spans(cuts, k, *inputs, blocks).sort(-1).values, expected)
    if ties:  # the rows that ask `topk` are there
        scores = score(*inputs).tril()
        last = scores.topk(k + 1, -1).values
        assert bool((last[..., -1] == last[..., -2]).any())


def test_choose_never_holds_the_scores_of_a_row_without_a_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: object, row_tokens: int) -> Tensor:
        raise AssertionError("a whole row was asked for")

    monkeypatch.setattr(selection._Tile, "_of_whole_rows", fails)
    spans([9, 20], 5, *(x.abs() for x in indexer()))  # no score is zero


@pytest.mark.parametrize("tile_bytes", [1, 1 << 25])
@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_attending_to_what_was_selected(
    monkeypatch: pytest.MonkeyPatch, latent: bool, shared: bool, tile_bytes: int
) -> None:
    monkeypatch.setattr(selection, "TILE_BYTES", tile_bytes)
    cut, k, heads, key_heads = 30, 6, 4, 1 if latent else 2
    key = random(1 if shared else ROWS, key_heads, TOKENS, 5, seed=3)
    value = key if latent else random(1 if shared else ROWS, key_heads, TOKENS, 7, seed=4)
    own = [x[:, :, cut:].expand(ROWS, -1, -1, -1).clone() for x in (key, value)]
    held = [x[:, :, :cut].clone() for x in (key, value)]
    query = random(ROWS, heads, TOKENS - cut, 5, seed=5)
    chosen = dense(*indexer(), k)[:, cut:]
    chosen[0, 2, 3:] = -1
    chosen[1, 4] = -1

    leaves = [x.detach().requires_grad_() for x in (query, own[0], *([] if latent else [own[1]]))]
    grads = [torch.zeros_like(held[0]), torch.zeros_like(held[1])]
    earlier = [KeyRange(0, held[0], held[1], grads[0], grads[0] if latent else grads[1])]
    out = selection.attend_to_selected(
        leaves[0], leaves[1], leaves[-1], start=cut, earlier=earlier, selected=chosen, scale=0.3
    )
    upstream = random(*out.shape, seed=6)
    found = torch.autograd.grad(out, leaves, upstream)

    everything = [x.detach().requires_grad_() for x in (query, *own, *held)]
    keys = torch.cat([everything[3].expand(ROWS, -1, -1, -1), everything[1]], 2).repeat_interleave(
        heads // key_heads, 1
    )
    values = torch.cat([everything[4].expand(ROWS, -1, -1, -1), everything[2]], 2).repeat_interleave(
        heads // key_heads, 1
    )
    seen = torch.zeros(ROWS, TOKENS - cut, TOKENS + 1, dtype=torch.bool).scatter(-1, chosen % (TOKENS + 1), True)
    seen = seen[:, None, :, :TOKENS]
    scores = (everything[0] @ keys.mT * 0.3).masked_fill(~seen, -torch.inf)
    weights = torch.softmax(scores.masked_fill(~seen.any(-1, keepdim=True), 0), -1) * seen
    expected = torch.autograd.grad(weights @ values, everything, upstream)
    torch.testing.assert_close(out.detach(), (weights @ values).detach(), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-11, atol=1e-13)
    of_own = [expected[1] + expected[2]] if latent else [expected[1], expected[2]]
    of_held = [expected[3] + expected[4]] if latent else [expected[3], expected[4]]
    for got, wanted in zip((*found[1:], *grads), (*of_own, *of_held), strict=False):
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-13)


def test_selected_blocks_are_the_mask_of_what_was_selected() -> None:
    chosen = dense(*indexer(), 5)
    blocks = selection.SelectedBlocks(CausalBlocks(), chosen, 0)
    expected = torch.zeros(ROWS, TOKENS, TOKENS + 1, dtype=torch.bool).scatter(-1, chosen % (TOKENS + 1), True)
    got = torch.cat([blocks.tensor(7, TOKENS, a, min(a + 9, TOKENS)) for a in range(0, TOKENS, 9)], -1)
    assert torch.equal(got[:, 0], expected[:, 7:, :TOKENS])
    assert blocks.verdict(0, 5, 0, 1) == CausalBlocks().verdict(0, 5, 0, 1) and blocks.verdict(0, 6, 0, 1) == "mixed"

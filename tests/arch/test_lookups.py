"""Masks that look per-token values up by row and token: blocks of tokens that see one another, documents in one row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longstraw.errors import UnsupportedMask
from tests.small import HEADS, KEY_HEADS, Tiny, assert_refused, assert_same, inputs, records, step

MARK = 7
"""The token that says where a block or a document is."""


class LooksUp(Tiny):
    """Attention under a mask of values `[rows, tokens]` that are looked up for queries and for keys."""

    def __init__(self, values: Callable[[Tensor, Tensor], Tensor], *, documents: bool = False) -> None:
        super().__init__()
        self.values, self.documents = values, documents
        self.ids: Tensor

    def hidden(self, ids: Tensor) -> Tensor:
        self.ids = ids
        return super().hidden(ids)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(self.query(x), HEADS), *(self.heads(f(x), KEY_HEADS) for f in (self.key, self.value))
        k, v = (t.repeat_interleave(HEADS // KEY_HEADS, 1) for t in (k, v))
        values = self.values(self.ids, x)
        rows, at = torch.arange(x.shape[0])[:, None, None, None], torch.arange(x.shape[1])
        queries, keys = at[None, None, :, None], at[None, None, None, :]
        of_query, of_key = values[rows, queries], values[rows, keys]
        same, causal = of_query == of_key, keys <= queries
        seen = same & causal if self.documents else causal | (same & (of_query >= 0))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def marked(at: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs with the mark at some tokens of the second row, and in no other."""
    prompt, responses, weights = inputs()
    prompt, responses = (x.masked_fill(x == MARK, MARK + 1) for x in (prompt, responses))
    for token in at:
        responses[1, token - prompt.shape[1]] = MARK
    return prompt, responses, weights


def test_documents_told_by_a_lookup_are_exact() -> None:
    torch._dynamo.reset()
    model = LooksUp(lambda ids, _: (ids == MARK).cumsum(1), documents=True)
    prompt, responses, weights = marked([11])
    prompt[0, 4] = MARK
    assert_same(model, prompt, responses, weights)


@pytest.mark.parametrize("at", [[], [10]], ids=["no block", "a block of one token"])
def test_blocks_that_see_no_later_token_are_exact(at: list[int]) -> None:
    torch._dynamo.reset()
    assert_same(LooksUp(lambda ids, _: torch.where(ids == MARK, 0, -1)), *marked(at))


@pytest.mark.parametrize("span_tokens", [2, 100])
@pytest.mark.parametrize("without_gradient", [0, 2])
def test_a_block_whose_tokens_see_later_ones_is_refused(span_tokens: int, without_gradient: int) -> None:
    torch._dynamo.reset()
    model = LooksUp(lambda ids, _: torch.where(ids == MARK, 0, -1))
    compiled = torch.compile(step, backend="longstraw", options={"span_tokens": span_tokens, "page_tokens": 2})
    compiled(model, *marked([10])).backward()
    for at in ([9, 10], [10, 11], [9, 11], [11, 12]):  # of one span or of two; no result needs the last token
        prompt, responses, weights = marked(at)
        weights[:, responses.shape[1] - without_gradient :] = 0
        if min(at) < 12 - without_gradient:
            with pytest.raises(UnsupportedMask, match="not causal"):
                compiled(model, prompt, responses, weights)
        else:  # no token that runs sees it
            torch.testing.assert_close(
                compiled(model, prompt, responses, weights), step(model, prompt, responses, weights)
            )


@pytest.mark.parametrize("made", [torch.zeros_like, torch.ones_like, lambda x: torch.full_like(x, 3)])
def test_what_is_made_like_hidden_values_has_only_their_sizes(made: Callable[[Tensor], Tensor]) -> None:
    torch._dynamo.reset()
    model = LooksUp(lambda _, x: torch.where(made(x)[..., 0] == 7, 0, -1))
    assert_same(model, *inputs())
    graph = records(step, model, *inputs())["normalise"].module.graph
    assert not any("_like" in str(node.target) for node in graph.nodes)


def test_one_block_of_all_tokens_is_refused() -> None:
    assert_refused("not causal", LooksUp(lambda _, x: torch.zeros_like(x)[..., 0]))


def test_a_part_of_hidden_values_is_not_a_constant() -> None:
    assert_refused("picks tokens or rows by index", LooksUp(lambda _, x: torch.where(x[..., 0] > 99, 0, -1)))

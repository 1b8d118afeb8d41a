"""The ops that rewritten graphs contain, beside ATen's.

`attention` is the one spelling of attention after normalise; calling it computes it densely, so that every stage's graph
runs. `attend` is its stateful form after insert_state: the span object that the graph gets as its first input knows the
earlier keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor


class Span(Protocol):
    """What a stateful graph asks of the run time."""

    def attend(
        self,
        site: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_inputs: tuple[Tensor, ...],
        sink: Tensor | None,
    ) -> Tensor:
        """Attend from the span's queries to earlier keys and the span's own; `[rows, heads, tokens, width]`."""
        ...


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masks: Sequence[Tensor] = (),
    causal: bool = False,
    scale: float = 1.0,
    score: Callable[..., Tensor] | None = None,
    score_inputs: Sequence[Tensor] = (),
    sink: Tensor | None = None,
) -> Tensor:
    """Scaled dot-product attention, computed densely.

    Args:
        query: `[rows, heads, tokens, width]`.
        key: `[rows, key_heads, tokens, width]`; heads is a multiple of key_heads, query head h reads key head
            `h // (heads // key_heads)`.
        value: `[rows, value_heads, tokens, value_width]`.
        masks: each `[rows|1, heads|1, tokens, tokens]`: bool (True = seen) or float (added to the scores).
        causal: whether a query sees only keys at or before its own position.
        scale: factor on the products.
        score: function of the scaled products and `score_inputs`, applied before masks.
        score_inputs: its other operands.
        sink: `[heads]`: logits of one more column with value zero.

    Returns:
        `[rows, heads, tokens, value_width]`; zeros for queries that see no key.
    """
    heads = query.shape[1]
    key = key.repeat_interleave(heads // key.shape[1], 1) if key.shape[1] != heads else key
    value = value.repeat_interleave(heads // value.shape[1], 1) if value.shape[1] != heads else value
    scores = query @ key.transpose(-1, -2) * scale
    if score is not None:
        scores = score(scores, *score_inputs)
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
    for mask in masks:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    if sink is not None:
        column = sink.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        scores = torch.cat([scores, column.to(scores.dtype)], -1)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    return weights[..., : key.shape[2]].to(value.dtype) @ value


def attend(
    span: Span,
    site: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_inputs: tuple[Tensor, ...] = (),
    sink: Tensor | None = None,
) -> Tensor:
    """Attend to earlier tokens' state and to the span's own keys; `site` says which attention of the model this is."""
    return span.attend(site, query, key, value, score_inputs, sink)

"""The ops that rewritten graphs contain, beside ATen's.

`attention` is the one spelling of attention after normalise; calling it computes it densely, so that every stage's
graph runs. `attend` is its stateful form after insert_state: the span object that the graph gets as its first input
knows the earlier keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


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
        expand_inputs: tuple[Any, ...],
        selected: Tensor | None,
    ) -> Tensor:
        """Attend from the span's queries to earlier keys and the span's own; `[rows, heads, tokens, width]`."""
        ...

    def choose(
        self, chooser: int, queries: tuple[Tensor, ...], keys: tuple[Tensor, ...], others: tuple[Tensor, ...]
    ) -> Tensor:
        """Select keys for the span's queries among earlier ones and the span's own; `[rows, tokens, k]`."""
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
    selected: Tensor | None = None,
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
        selected: `[rows, tokens, k]`: the only keys that each query sees, of those that masks let it see.

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
    if selected is not None:
        chosen = torch.zeros(scores.shape[0], *scores.shape[2:], dtype=torch.bool, device=scores.device)
        masks = (*masks, chosen.scatter(-1, selected.long(), True)[:, None])
    for mask in masks:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    if sink is not None:
        column = sink.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        scores = torch.cat([scores, column.to(scores.dtype)], -1)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    return weights[..., : key.shape[2]].to(value.dtype) @ value


def select(
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    others: Sequence[Tensor],
    masks: Sequence[Tensor],
    k: int,
    score: Callable[..., Tensor],
    query_dims: Sequence[int],
) -> Tensor:
    """Select the k keys of the highest score for every query, computed densely; not differentiable.

    Args:
        queries: per-token values, query tokens in the dims `query_dims`.
        keys: per-token values `[rows, heads, tokens, width]`.
        others: values without tokens, such as weights.
        masks: each `[rows|1, 1, tokens, tokens]`: bool (True = may be selected) or float (added to the scores).
        k: how many; where there are fewer tokens, all of them.
        score: `(*queries, *keys, *others) -> scores [rows, tokens, tokens]`, of each pair by itself.
        query_dims: one for each of `queries`.

    Returns:
        Indices of tokens `[rows, tokens, k]`, int64. Between equal scores `torch.topk` on the whole row chooses.
    """
    scores = score(*queries, *keys, *others)
    for mask in masks:
        mask = mask[:, 0]
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return scores.topk(min(k, scores.shape[-1]), -1).indices


TILE_BYTES = 64 << 20
"""What the values of a tile may take when a wide part of a segment is run in tiles."""


def tiled(
    function: Callable[..., Tensor],
    bytes_per_token: int,
    rows: int,
    tokens: int,
    token_dims: tuple[int | None, ...],
    result_dim: int,
    *inputs: Tensor,
) -> Tensor:
    """Run a token-wise function on tiles of tokens where its values for all of them would take more than `TILE_BYTES`.

    Args:
        function: `(rows, tokens, *inputs) -> value`.
        bytes_per_token: what its values take per token of a row.
        rows, tokens: what is run.
        token_dims: for each input the dim that runs over tokens, or None (weights).
        result_dim: the dim of the value that runs over tokens.
        inputs: its inputs.

    Returns:
        The value for all tokens. In tiles, autograd keeps the inputs only, and backward runs the function again.
    """
    tile = max(1, TILE_BYTES // max(1, bytes_per_token * rows))
    if tile >= tokens:
        return function(rows, tokens, *inputs)
    plan = _Tiles(function, rows, tokens, tile, token_dims, result_dim)
    return _Tiled.apply(plan, *inputs)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class _Tiles:
    function: Callable[..., Tensor]
    rows: int
    tokens: int
    tile: int
    token_dims: tuple[int | None, ...]
    result_dim: int

    def ranges(self) -> list[tuple[int, int]]:
        return [(lo, min(self.tile, self.tokens - lo)) for lo in range(0, self.tokens, self.tile)]

    def cut(self, inputs: Sequence[Any], lo: int, count: int) -> list[Any]:
        return [
            x if dim is None or not isinstance(x, Tensor) else x.narrow(dim, lo, count)
            for x, dim in zip(inputs, self.token_dims, strict=True)
        ]


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: _Tiles, *inputs: Tensor) -> Tensor:
        ctx.plan = plan
        ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in inputs))
        parts = [plan.function(plan.rows, n, *plan.cut(inputs, lo, n)) for lo, n in plan.ranges()]
        return torch.cat(parts, plan.result_dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        plan: _Tiles = ctx.plan
        inputs = [o if x is None else x for x, o in zip(ctx.saved_tensors, ctx.others, strict=True)]
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
        sums = {i: torch.zeros_like(inputs[i]) for i in wanted}
        for lo, count in plan.ranges():
            with torch.enable_grad():
                cut = plan.cut([x.detach() if isinstance(x, Tensor) else x for x in inputs], lo, count)
                for i in wanted:
                    cut[i].requires_grad_()
                out = plan.function(plan.rows, count, *cut)
            part = grad.narrow(plan.result_dim, lo, count)
            found = torch.autograd.grad(out, [cut[i] for i in wanted], part, allow_unused=True)
            for i, value in zip(wanted, found, strict=True):
                if value is not None:
                    dim = plan.token_dims[i]
                    (sums[i] if dim is None else sums[i].narrow(dim, lo, count)).add_(value)
        return (None, *(sums.get(i) for i in range(len(inputs))))


@torch.compiler.disable  # an inner backend compiles what stands between
def attend(
    span: Span,
    site: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_inputs: tuple[Tensor, ...] = (),
    sink: Tensor | None = None,
    expand_inputs: tuple[Any, ...] = (),
    selected: Tensor | None = None,
) -> Tensor:
    """Attend to earlier tokens' state and to the span's own keys; `site` says which attention of the model this is.

    Where keys and values are built from latents, `key` and `value` are both the span's latents, and `expand_inputs` are
    the weights that build them. `selected` are the keys that each query sees, from `choose`.
    """
    return span.attend(site, query, key, value, score_inputs, sink, expand_inputs, selected)


@torch.compiler.disable
def choose(
    span: Span, chooser: int, queries: tuple[Tensor, ...], keys: tuple[Tensor, ...], others: tuple[Tensor, ...]
) -> Tensor:
    """Select keys among earlier tokens and the span's own: `select`, on a span.

    Returns:
        `[rows, tokens, k]`, in row coordinates; -1 where a query may select fewer than k keys.
    """
    with torch.no_grad():
        return span.choose(chooser, queries, keys, others)

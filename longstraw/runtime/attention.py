"""Attention of one span's queries over keys captured earlier and the span's own keys.

In:  the span's query, key, value; key ranges captured earlier, with accumulators for their gradients; `Blocks`, which
     says what may be seen.
Out: the span's attention output. Its backward returns gradients of the span's own inputs and adds those of the earlier
     ranges straight into the accumulators, so that autograd never holds a graph across spans.

Steps:
1. `key_parts.cut` cuts queries x keys into parts: unseen ones are dropped, wholly seen ones are long, and only those
   that mix seen and unseen pairs (or carry a bias) are short and get a mask.
2. Forward runs each part with a library kernel and merges the outputs by log-sum-exp.
3. Backward runs each part's backward with the *merged* output and log-sum-exp, which is all that it needs to know of
   the other parts. What is saved does not grow with the number of keys.

Queries that read the same keys (a group of query heads; all rows of a shared range) are folded into units, so keys
are never repeated. Temporaries are bounded by the tile sizes below.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longstraw import compat
from longstraw.runtime.kernels.attention_parts import PartKernel, Rescore, Tile, TileGrads, pick_kernel
from longstraw.runtime.kernels.fold import Fold
from longstraw.runtime.key_parts import CUT, Blocks, KeyPart, KeyRange, Plans, QueryTile, cut
from longstraw.runtime.merge import accumulate_dtype, merge_into, merge_sink_into

KEY_TILE = 4096  # keys of a part without a mask
BUILT_BYTES = 64 << 20  # what keys and values that are built from latents may take at once

ScoreFunction = Callable[..., Tensor]
"""`score(raw, q0, q1, k0, k1, *score_inputs)`: differentiable, of the scaled products [rows, heads, q, k]."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    start: int,
    earlier: Sequence[KeyRange],
    blocks: Blocks,
    scale: float,
    score: ScoreFunction | None = None,
    score_inputs: tuple[Tensor, ...] = (),
    sink: Tensor | None = None,
    key_tile: int = KEY_TILE,
    plans: Plans | None = None,
    build: Build | None = None,
) -> Tensor:
    """Softmax attention of the span over `earlier` and itself: [rows, heads, C, value_width] in query's dtype.

    query [rows, heads, C, key_width], key [rows, key_heads, C, key_width] and value [rows, value_heads, C, value_width]
    are the span's own, tokens start..start+C. Query head h uses key head h // (heads // key_heads), likewise value.
    `blocks` is applied after `score`. `sink` [heads] is the logit of a further key whose value is zero.
    A query that sees no key has output 0 and passes no gradient. `plans` remembers how queries and keys were cut, for
    calls with the same `blocks` object: layers of one kind cut alike. With `build`, key and value are both the span's
    latents [rows, 1, C, latent_width], as in the earlier ranges; keys and values of a part are built when it is
    attended to, and built again in backward.
    """
    rows, heads, tokens, width = query.shape
    assert key.shape[:1] == value.shape[:1] == (rows,) and key.shape[2] == value.shape[2] == tokens
    if build is None:
        assert heads % key.shape[1] == 0 and heads % value.shape[1] == 0 and key.shape[3] == width
    else:
        assert key is value and build.key_width == width
        key_tile = max(CUT, min(key_tile, BUILT_BYTES // (build.numbers * key.element_size())))
    assert score is not None or not score_inputs
    assert sink is None or sink.shape == (heads,)
    for part in earlier:
        assert part.key.shape[0] == part.value.shape[0] and part.key.shape[0] in (1, rows)
        assert part.key.shape[1] == key.shape[1] and part.value.shape[1] == value.shape[1]
        assert part.key.shape[2] == part.value.shape[2]
    device = query.device.type
    autocast = compat.current_autocast(device)
    if score is not None:
        score = _under(autocast, score)
    if build is not None:
        build = build._replace(function=_under(autocast, build.function))
    call = _Call(start, tuple(earlier), blocks, scale, score, key_tile, {} if plans is None else plans, build)
    inputs = (*score_inputs, *(() if build is None else build.inputs))
    with compat.without_autocast(device):  # dtypes are chosen here
        out: Tensor = _Attend.apply(query, key, value, sink, call, len(score_inputs), *inputs)  # type: ignore[no-untyped-call]
    return out


def _under(autocast: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs under the autocast settings of now, also in backward."""

    def run(*args: Any) -> Any:
        with compat.autocast_state(autocast):
            return function(*args)

    return run


class Build(NamedTuple):
    """How keys and values are built from latents.

    Attributes:
        function: `(rows, tokens, *inputs, latents [rows, 1, tokens, width]) -> (keys, values)`.
        inputs: tensors (differentiated) and other arguments.
        key_heads, key_width, value_heads, value_width: sizes of what it builds.
    """

    function: Callable[..., tuple[Tensor, Tensor]]
    inputs: tuple[Any, ...]
    key_heads: int
    key_width: int
    value_heads: int
    value_width: int

    @property
    def numbers(self) -> int:
        """Numbers per token of what it builds."""
        return self.key_heads * self.key_width + self.value_heads * self.value_width


class _Call(NamedTuple):
    start: int
    earlier: tuple[KeyRange, ...]
    blocks: Blocks
    scale: float
    score: ScoreFunction | None
    key_tile: int
    plans: Plans
    build: Build | None = None

    def plan(self, tokens: int, *, builds_scores: bool) -> tuple[QueryTile, ...]:
        """Return how the span's queries and the keys they see are cut, remembered for the next layer."""
        sources = tuple((part.start, part.start + part.key.shape[2]) for part in self.earlier)
        key = (id(self.blocks), self.start, tokens, sources, builds_scores, self.key_tile)
        if key not in self.plans:
            with compat.outside_of_fakes():  # where spans are rehearsed: what is seen isn't fake
                self.plans[key] = cut(
                    self.blocks, self.start, tokens, sources, key_tile=self.key_tile, builds_scores=builds_scores
                )
        return self.plans[key]


class _Keys(NamedTuple):
    """A part's keys and values, and the latents that they were built from."""

    key: Tensor
    value: Tensor
    latents: Tensor | None = None


class _Span:
    """The span's tensors and what is common to forward and backward."""

    def __init__(
        self,
        call: _Call,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_inputs: tuple[Tensor, ...] = (),
        build_inputs: tuple[Any, ...] = (),
    ) -> None:
        self.call, self.query, self.key, self.value, self.score_inputs = call, query, key, value, score_inputs
        self.build_inputs = build_inputs
        build = call.build
        heads = (key.shape[1], value.shape[1]) if build is None else (build.key_heads, build.value_heads)
        widths = (key.shape[-1], value.shape[-1]) if build is None else (build.key_width, build.value_width)
        self.unit_heads, self.width, self.value_width = math.lcm(*heads), max(widths), widths[1]

    def kernel(self, *, biased: bool = False) -> PartKernel:
        width = self.width
        rescored = self.call.score is not None
        return pick_kernel(self.query.device, self.query.dtype, width, biased=biased, rescored=rescored)

    def keys(self, part: KeyPart, *, differentiable: bool) -> _Keys:
        """Return the part's keys and values, built where they are; `differentiable` keeps the graph of the building."""
        if part.source < 0:
            kept = self._own(part, self.key), self._own(part, self.value)
        else:
            kept = self.call.earlier[part.source].read(part.k0, part.k1)
        if self.call.build is None:
            return _Keys(*kept)
        latents = kept[0].detach()
        with torch.set_grad_enabled(differentiable):
            latents.requires_grad_(differentiable)
            key, value = self.call.build.function(latents.shape[0], latents.shape[2], *self.build_inputs, latents)
        return _Keys(key, value, latents)

    def in_turn(self, parts: Sequence[KeyPart], *, differentiable: bool) -> Iterator[tuple[KeyPart, _Keys]]:
        """Yield parts and their keys, those of the next part on their way to the device."""
        for i, part in enumerate(parts):
            keys = self.keys(part, differentiable=differentiable)
            if i + 1 < len(parts) and parts[i + 1].source >= 0:
                following = parts[i + 1]
                self.call.earlier[following.source].prefetch(following.k0, following.k1)
            yield part, keys

    def send(
        self,
        part: KeyPart,
        keys: _Keys,
        fold: Fold,
        grads: TileGrads,
        own: tuple[Tensor, Tensor],
        build_grads: list[Tensor | None],
    ) -> None:
        """Add a part's gradients to those of its keys and values, or to those of what they were built from.

        Args:
            part: the part.
            keys: its keys and values.
            fold: how its queries were folded.
            grads: of its tile.
            own: gradients of the span's own keys and values (both those of its latents).
            build_grads: sums of the gradients of `build_inputs`; None for those without one.
        """
        targets = self.accumulators(part, *own)
        if self.call.build is None:
            for target, grad in zip(targets, (grads.key, grads.value), strict=True):
                if target is not None:
                    fold.add_keys_grad(target, grad)
            return
        pairs = []
        for x, grad in zip((keys.key, keys.value), (grads.key, grads.value), strict=True):
            folded = torch.zeros_like(x, dtype=grad.dtype)
            fold.add_keys_grad(folded, grad)
            if x.requires_grad:  # not where it is built without a gradient
                pairs.append((x, folded.to(x.dtype)))
        if not pairs:
            return
        assert keys.latents is not None, "the part's keys were built"
        wanted = [i for i, total in enumerate(build_grads) if total is not None]
        sources = [keys.latents, *(self.build_inputs[i] for i in wanted)]
        found = torch.autograd.grad([x for x, _ in pairs], sources, [g for _, g in pairs], allow_unused=True)
        if targets[0] is not None and found[0] is not None:
            targets[0].add_(found[0].to(targets[0].device))
        for i, grad in zip(wanted, found[1:], strict=True):
            total = build_grads[i]
            if total is not None and grad is not None:
                total.add_(grad)

    def accumulators(self, part: KeyPart, grad_key: Tensor, grad_value: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Where the gradients of the part's keys and values go; `grad_key` and `grad_value` are the span's own."""
        if part.source < 0:
            return self._own(part, grad_key), self._own(part, grad_value)
        return self.call.earlier[part.source].accumulators(part.k0, part.k1)

    def _own(self, part: KeyPart, x: Tensor) -> Tensor:
        return x.narrow(2, part.k0 - self.call.start, part.k1 - part.k0)


class _FoldedQueries:
    """A tile of queries (and of other tensors of the queries' layout), folded once for each fold and dtype."""

    def __init__(self, span: _Span, q0: int, q1: int, *others: Tensor) -> None:
        self.span, self.q0, self.q1 = span, q0, q1
        first = q0 - span.call.start
        self.tensors = [x[:, :, first : first + q1 - q0] for x in (span.query, *others)]
        self.folded: dict[tuple[bool, torch.dtype], list[Tensor]] = {}

    def part(self, part: KeyPart, keys: _Keys) -> tuple[PartKernel, Fold, Tile, list[Tensor]]:
        """The part's kernel, fold and tile, and the other tensors, folded."""
        span, call = self.span, self.span.call
        kernel = span.kernel(biased=part.kind == "mixed")
        dtype = kernel.compute_dtype(span.query.dtype)
        key, value = keys.key.detach(), keys.value.detach()
        fold = Fold(span.query.shape[0], span.query.shape[1], span.unit_heads, shared=key.shape[0] == 1)
        if (fold.shared, dtype) not in self.folded:
            wide = accumulate_dtype(dtype)  # log-sum-exps, which have no width, stay in the wide type
            folded = [fold.queries(x, dtype if x.dim() == 4 else wide) for x in self.tensors]
            self.folded[fold.shared, dtype] = folded
        query, *others = self.folded[fold.shared, dtype]
        where = (self.q0, self.q1, part.k0, part.k1)
        tile = Tile(
            query=query,
            key=fold.keys(key, dtype),
            value=fold.keys(value, dtype),
            scale=call.scale,
            causal=part.kind == "causal",
            bias=fold.bias(call.blocks.tensor(*where), dtype) if part.kind == "mixed" else None,
            rescore=None if call.score is None else _folded_score(call.score, fold, *where),
            rescore_inputs=span.score_inputs,
        )
        return kernel, fold, tile, others


def _widened(x: Tensor) -> Tensor:
    """A score input in the dtype of the scores, so that its gradient is summed over tiles there."""
    return x.detach().to(accumulate_dtype(x.dtype)) if x.is_floating_point() else x.detach()


def _folded_score(score: ScoreFunction, fold: Fold, q0: int, q1: int, k0: int, k1: int) -> Rescore:
    """`score` as a function of folded products."""

    def rescore(raw: Tensor, *inputs: Tensor) -> Tensor:
        scores = score(fold.undo(raw).flatten(1, 2), q0, q1, k0, k1, *inputs)
        return fold.queries(scores, raw.dtype)

    return rescore


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink: Tensor | None,
        call: _Call,
        num_score: int,
        *inputs: Any,
    ) -> Tensor:
        score_inputs, build_inputs = inputs[:num_score], inputs[num_score:]
        span = _Span(call, query, key, value, tuple(_widened(x) for x in score_inputs), build_inputs)
        rows, heads, tokens, _ = query.shape
        plan = call.plan(tokens, builds_scores=span.kernel().builds_scores)
        wide = accumulate_dtype(query.dtype)
        out = torch.zeros(rows, heads, tokens, span.value_width, dtype=wide, device=query.device)
        lse = torch.full((rows, heads, tokens), -torch.inf, dtype=wide, device=query.device)
        split_out, split_lse = (x.unflatten(1, (span.unit_heads, -1)) for x in (out, lse))
        for q0, q1, parts in plan:
            folded = _FoldedQueries(span, q0, q1)
            here = (slice(None), slice(None), slice(None), slice(q0 - call.start, q1 - call.start))
            for part, keys in span.in_turn(parts, differentiable=False):
                kernel, fold, tile, _ = folded.part(part, keys)
                part_out, part_lse = kernel.forward(tile)
                merge_into(split_out[here], split_lse[here], fold.undo(part_out), fold.undo(part_lse))
        if sink is not None:
            merge_sink_into(out, lse, sink.to(wide)[:, None])
        result = out.to(query.dtype)
        tensors = [x if isinstance(x, Tensor) else None for x in build_inputs]
        ctx.save_for_backward(query, key, value, result, lse, sink, *score_inputs, *tensors)
        ctx.numbers = [None if isinstance(x, Tensor) else x for x in build_inputs]
        ctx.call, ctx.plan, ctx.num_score = call, plan, num_score
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, sink, *saved = ctx.saved_tensors
        score_inputs, tensors = saved[: ctx.num_score], saved[ctx.num_score :]
        call, wide = ctx.call, lse.dtype
        wanted = ctx.needs_input_grad[6:]
        inputs = tuple(_widened(x).requires_grad_(w) for x, w in zip(score_inputs, wanted, strict=False))
        build_inputs = tuple(
            n if x is None else x.detach().requires_grad_(w)
            for n, x, w in zip(ctx.numbers, tensors, wanted[ctx.num_score :], strict=True)
        )
        build_grads = [
            torch.zeros_like(x, dtype=accumulate_dtype(x.dtype)) if w else None
            for x, w in zip(tensors, wanted[ctx.num_score :], strict=True)
        ]
        span = _Span(call, query, key, value, inputs, build_inputs)
        grad_query, grad_key, grad_value = (torch.zeros_like(x, dtype=wide) for x in (query, key, value))
        grad_inputs = [torch.zeros_like(x) if x.requires_grad else None for x in inputs]
        split_query = grad_query.unflatten(1, (span.unit_heads, -1))
        weightless = lse.masked_fill(lse == -torch.inf, torch.inf)  # exp(score - inf) = 0, whatever the score
        for q0, q1, parts in ctx.plan:
            folded = _FoldedQueries(span, q0, q1, grad_out, out, weightless)
            for part, keys in span.in_turn(parts, differentiable=True):
                kernel, fold, tile, others = folded.part(part, keys)
                grads = kernel.backward(tile, *others)
                split_query[:, :, :, q0 - call.start : q1 - call.start].add_(fold.undo(grads.query))
                span.send(part, keys, fold, grads, (grad_key, grad_value), build_grads)
                for total, more in zip(grad_inputs, grads.rescore_inputs, strict=False):
                    if total is not None and more is not None:
                        total.add_(more)
        grad_sink = None
        if sink is not None and ctx.needs_input_grad[3]:
            delta = (grad_out.to(wide) * out.to(wide)).sum(-1)
            weight = (sink.to(wide)[:, None] - weightless).exp()
            grad_sink = (weight * delta).sum((0, 2)).neg().to(sink.dtype)
        return (
            grad_query.to(query.dtype),
            grad_key.to(key.dtype),
            grad_value.to(value.dtype),
            grad_sink,
            None,
            None,
            *(None if g is None else g.to(x.dtype) for g, x in zip(grad_inputs, score_inputs, strict=True)),
            *(None if g is None else g.to(x.dtype) for g, x in zip(build_grads, tensors, strict=True)),
        )

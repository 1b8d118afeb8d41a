"""Attention whose output is rescaled by what a sink leaves of it: what is understood, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import longstraw.ops
from tests.small import HEADS, KEY_HEADS, Tiny, assert_refused, assert_same, inputs, records, step

Rescale = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""`(output, raw scores, masked scores, sinks) -> output`"""


class Rescaled(Tiny):
    """Explicit attention over a window, with something done to its output."""

    def __init__(self, rescale: Rescale, sinks: tuple[int, ...] = (HEADS,), *, dim: int = -1) -> None:
        super().__init__()
        self.rescale, self.dim = rescale, dim
        self.sinks = nn.Parameter(torch.randn(sinks, dtype=torch.float64))

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(self.query(x), HEADS), *(self.heads(f(x), KEY_HEADS) for f in (self.key, self.value))
        k, v = (t.repeat_interleave(HEADS // KEY_HEADS, 1) for t in (k, v))
        raw = q @ k.transpose(-1, -2) * 0.3
        seen = torch.ones(raw.shape[-2:], dtype=torch.bool).tril().triu(-5)
        scores = raw + torch.zeros(raw.shape[-2:], dtype=raw.dtype).masked_fill(~seen, float("-inf"))
        return self.rescale(torch.softmax(scores, self.dim, dtype=torch.float64) @ v, raw, scores, self.sinks)


def sink_of(sinks: Tensor) -> Tensor:
    return sinks.view(1, -1, 1)


UNDERSTOOD: dict[str, tuple[Rescale, tuple[int, ...]]] = {
    "a sink for each head": (
        lambda out, raw, s, sinks: out * (s.logsumexp(-1) - sink_of(sinks)).sigmoid().unsqueeze(-1),
        (HEADS,),
    ),
    "the last dim kept, factor first": (
        lambda out, raw, s, sinks: torch.sigmoid(torch.logsumexp(s, 3, keepdim=True) - sinks[:, None, None]) * out,
        (HEADS,),
    ),
    "one sink for all": (lambda out, raw, s, sinks: out * (s.logsumexp(-1) - sinks).sigmoid()[..., None], ()),
    "computed from weights": (
        lambda out, raw, s, sinks: out * (s.logsumexp(-1)[..., None] - (3 * sinks.tanh()).mean(0)).sigmoid(),
        (5, HEADS, 1, 1),
    ),
}


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_a_rescaling_is_a_sink(name: str) -> None:
    torch._dynamo.reset()
    model = Rescaled(*UNDERSTOOD[name])
    assert_same(model, *inputs())
    module = records(step, model, *inputs())["normalise"].module
    (attention,) = (node for node in module.graph.nodes if node.target is longstraw.ops.attention)
    assert attention.args[8].meta["val"].shape == (HEADS,)


def test_casts_may_stand_between() -> None:
    def cast(out: Tensor, raw: Tensor, scores: Tensor, sinks: Tensor) -> Tensor:
        left = (scores.float().logsumexp(-1).double() - sink_of(sinks)).to(torch.float32).sigmoid()
        return out * left.unsqueeze(-1).to(out.dtype)

    torch._dynamo.reset()
    module = records(step, Rescaled(cast), *inputs())["normalise"].module
    (attention,) = (node for node in module.graph.nodes if node.target is longstraw.ops.attention)
    assert attention.args[8] is not None and attention.meta["val"].dtype == torch.float64


OTHERWISE = "the logsumexp of its scores has a use that is not"
REFUSED: dict[str, Rescale] = {
    "the other way round": lambda out, raw, s, sinks: out * (sink_of(sinks) - s.logsumexp(-1)).sigmoid()[..., None],
    "another function": lambda out, raw, s, sinks: out * (s.logsumexp(-1) - sink_of(sinks)).tanh()[..., None],
    "scaled": lambda out, raw, s, sinks: out * (2 * s.logsumexp(-1) - sink_of(sinks)).sigmoid()[..., None],
    "a scaled sink": lambda out, raw, s, sinks: (
        out * torch.sub(s.logsumexp(-1), sink_of(sinks), alpha=2).sigmoid()[..., None]
    ),
    "of unmasked scores": lambda out, raw, s, sinks: out * (raw.logsumexp(-1) - sink_of(sinks)).sigmoid()[..., None],
    "over the queries": lambda out, raw, s, sinks: out * (s.logsumexp(-2) - sink_of(sinks)).sigmoid()[..., None],
    "added": lambda out, raw, s, sinks: out + (s.logsumexp(-1) - sink_of(sinks)).sigmoid()[..., None],
    "squared": lambda out, raw, s, sinks: out * (s.logsumexp(-1) - sink_of(sinks)).sigmoid()[..., None] ** 2,
    "used twice": lambda out, raw, s, sinks: (
        out * (s.logsumexp(-1) - sink_of(sinks)).sigmoid()[..., None] + s.logsumexp(-1)[..., None]
    ),
    "read before": lambda out, raw, s, sinks: out + out * (s.logsumexp(-1) - sink_of(sinks)).sigmoid()[..., None],
    "a sink for each query": lambda out, raw, s, sinks: out * (s.logsumexp(-1) - out.sum(-1)).sigmoid()[..., None],
}


@pytest.mark.parametrize("name", REFUSED)
def test_another_use_of_the_logsumexp_is_refused(name: str) -> None:
    assert_refused(OTHERWISE, Rescaled(REFUSED[name]))


def test_a_softmax_over_the_queries_is_refused() -> None:
    assert_refused("does not go over the keys", Rescaled(lambda out, raw, s, sinks: out * sinks.sum(), dim=-2))


class Joined(Tiny):
    """Explicit attention with a column of sinks joined to its scores."""

    def __init__(self, column: Callable[[Tensor, Tensor], Tensor], sinks: tuple[int, ...], *, learns: bool) -> None:
        super().__init__()
        self.column = column
        self.sinks = nn.Parameter(torch.randn(sinks, dtype=torch.float64), requires_grad=learns)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(self.query(x), HEADS), *(self.heads(f(x), KEY_HEADS) for f in (self.key, self.value))
        k, v = (t.repeat_interleave(HEADS // KEY_HEADS, 1) for t in (k, v))
        scores = q @ k.mT * 0.3
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
        column = self.column(self.sinks, scores).expand(*scores.shape[:-1], 1)
        return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v


COLUMNS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...]]] = {
    "a vector": (lambda s, _: s.view(1, -1, 1, 1), (HEADS,)),
    "a vector of columns": (lambda s, _: s[:, None, None], (HEADS,)),
    "scaled with two dims": (lambda s, _: (s.view(1, HEADS) * 1.5).view(1, HEADS, 1, 1), (HEADS,)),
    "scaled with four dims": (lambda s, _: s.view(1, HEADS, 1, 1) * 1.5 + 1, (HEADS,)),
    "in another order": (lambda s, _: s.view(2, 2).t().reshape(1, HEADS, 1, 1), (HEADS,)),
    "one for two heads": (lambda s, _: s.view(1, 2, 1, 1, 1).expand(1, 2, 2, 1, 1).reshape(1, HEADS, 1, 1), (2,)),
    "one for all": (lambda s, _: s.view(1, 1, 1, 1), (1,)),
    "a number": (lambda s, _: s, ()),
    "expanded by the model": (lambda s, x: s.reshape(1, -1, 1, 1).expand(x.shape[0], -1, x.shape[2], -1), (HEADS,)),
}


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("span_tokens", [1, HEADS, 100])
def test_a_joined_column_of_sinks_is_exact(name: str, learns: bool, span_tokens: int) -> None:
    torch._dynamo.reset()
    column, sizes = COLUMNS[name]
    assert_same(Joined(column, sizes, learns=learns), *inputs(8, 4), span_tokens=span_tokens)


@pytest.mark.parametrize("group", [2, HEADS])
def test_a_joined_column_of_rows_flattened_with_heads(group: int) -> None:
    class Flat(Joined):
        def attend(self, x: Tensor) -> Tensor:
            q, k, v = self.heads(self.query(x), HEADS), *(self.heads(f(x), KEY_HEADS) for f in (self.key, self.value))
            q, k, v = (
                t.repeat_interleave(HEADS // t.shape[1], 1).reshape(-1, x.shape[1], t.shape[-1]) for t in (q, k, v)
            )
            scores = torch.bmm(q, k.mT) * 0.3
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
            column = self.sinks.view(1, HEADS, 1, 1).expand(x.shape[0], -1, x.shape[1], -1)
            weights = torch.cat([scores, column.reshape(-1, x.shape[1], 1)], -1).softmax(-1)[..., :-1]
            return torch.bmm(weights, v).view(x.shape[0], HEADS, x.shape[1], -1)

    torch._dynamo.reset()
    assert_same(Flat(lambda s, _: s, (HEADS,), learns=True), *inputs(9, 4, group))


def test_sinks_of_each_row_are_refused() -> None:
    model = Joined(lambda s, x: s.view(1, 1, 1, 1) * torch.arange(x.shape[0]).view(-1, 1, 1, 1), (1,), learns=True)
    assert_refused("sinks are other than one for each head", model)

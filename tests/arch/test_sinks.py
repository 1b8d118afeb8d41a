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

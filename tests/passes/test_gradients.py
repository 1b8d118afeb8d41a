"""What a gradient flows through, told from graphs of a few ops."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from longstraw.arch.rules import op_name
from longstraw.passes.gradients import flow


def traced(function: Callable[..., object]) -> fx.Graph:
    return make_fx(function, pre_dispatch=True)(torch.randn(3), torch.randn(3)).graph


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda weight, x: (weight * x).sum(), ["placeholder", "aten.mul", "aten.sum"]),
        (lambda weight, x: (weight.detach() * x).sum(), []),
        (lambda weight, x: (weight * x).detach().sum(), []),
        (lambda weight, x: x[(weight * x).argsort()].sum(), []),
        (lambda weight, x: (weight * x).new_ones(3) + x.exp(), []),
        (lambda weight, x: (weight.exp(), (weight.sin() * x).detach()), ["placeholder", "aten.exp"]),
    ],
    ids=["trained", "detached", "result detached", "indices", "sizes", "one of two outputs"],
)
def test_flow_goes_from_what_is_trained_to_outputs(
    function: Callable[[Tensor, Tensor], object], expected: list[str]
) -> None:
    graph = traced(function)
    weight = next(iter(graph.nodes))
    found = flow(graph, trained=frozenset([weight.name]))
    assert [op_name(node) for node in graph.nodes if node in found] == expected


def test_flow_is_empty_where_nothing_is_trained() -> None:
    assert not flow(traced(lambda weight, x: (weight * x).sum()), trained=frozenset())

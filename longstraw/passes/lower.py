"""lower: what the run time needs beside the segments.

In: `WithState`. Out: `Lowered`: the prologue, which computes the light values that segments and masks read, once for
all rows and tokens, and what runs each segment graph. The widest token-wise parts of the segments become tiled calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from longstraw.layout import bytes_per_token
from longstraw.passes.partition import extract
from longstraw.passes.tile import tile_wide_parts
from longstraw.passes.trace import copy_graph
from longstraw.stages import Lowered, Runs, Stateful, WithState


def _tiled(branch: Stateful, layouts: Mapping[fx.Node, Any]) -> Stateful:
    """Return a branch with the widest parts of its graphs as tiled calls."""
    hidden = min((bytes_per_token(layouts[node], node.meta["val"]) for node in branch.segment.frontier), default=0)
    capture, score, relay = (
        tile_wide_parts(copy_graph(module), hidden) for module in (branch.capture, branch.score, branch.relay)
    )
    return replace(branch, capture=capture, score=score, relay=relay)


def lower(step: WithState) -> Lowered:
    """Return the step ready to run."""
    located = step.partitioned.step
    step = replace(step, branches=tuple(_tiled(branch, located.layouts) for branch in step.branches))
    light: dict[fx.Node, None] = {}
    for branch in step.branches:
        graphs = [branch.segment.body, *(head.graph for head in branch.segment.heads)]
        for graph in graphs:
            light.update(dict.fromkeys(graph.inputs.values))
            light.update(dict.fromkeys(t.node for t in graph.inputs.tokens))
        for program in branch.masks:
            light.update(dict.fromkeys(program.inputs))
    nodes = tuple(light)
    runs = _runs_of(located.options.inner_backend)
    branches = tuple(
        Runs(
            capture=runs(branch.capture),
            score=runs(branch.score),
            relay=runs(branch.relay),
            heads=tuple(runs(head.graph.module) for head in branch.segment.heads),
        )
        for branch in step.branches
    )
    return Lowered(step, extract(located.module, outputs=nodes, stops=()), nodes, branches)


def _runs_of(inner_backend: Any) -> Callable[[fx.GraphModule], Callable[..., Any]]:
    """Return what makes a function of a segment graph: the graph itself, or compiled between its attentions."""
    if inner_backend == "eager":
        return lambda module: module
    return lambda module: torch.compile(module, backend=inner_backend, dynamic=True)

"""lower: what the run time needs beside the segments.

In: `WithState`. Out: `Lowered`: the prologue, which computes the light values that segments and masks read, once for all
rows and tokens.
"""

from __future__ import annotations

from torch import fx

from longstraw.passes.partition import extract
from longstraw.stages import Lowered, WithState


def lower(step: WithState) -> Lowered:
    """Return the step ready to run."""
    located = step.partitioned.step
    light: dict[fx.Node, None] = {}
    for branch in step.branches:
        graphs = [branch.segment.body, *(head.graph for head in branch.segment.heads)]
        for graph in graphs:
            light.update(dict.fromkeys(graph.inputs.values))
            light.update(dict.fromkeys(t.node for t in graph.inputs.tokens))
        for program in branch.masks:
            light.update(dict.fromkeys(program.inputs))
    nodes = tuple(light)
    return Lowered(step, extract(located.module, outputs=nodes, stops=()), nodes)

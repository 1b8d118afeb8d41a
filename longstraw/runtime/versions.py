"""What tells that something which backward reads again was changed or replaced since the forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, fx

from longstraw import compat
from longstraw.stages import Input, Stateful

Versions = dict[str, tuple[str, tuple[int, int]]]


def versions(branch: Stateful, values: Mapping[fx.Node, Any], inputs: Sequence[Input]) -> Versions:
    """Return for everything that backward reads again the user's name of it, its version counter and its place.

    Args:
        branch: the branch.
        values: every input and light value, by node of the step.
        inputs: the step's, for their names.
    """
    sources = {given.name: given.source for given in inputs}
    names = {_memory(value): sources[node.name] for node, value in values.items() if node.name in sources}
    read = [node for program in branch.masks for node in program.inputs]
    for graph in (branch.segment.body, *(head.graph for head in branch.segment.heads)):
        read += [*graph.inputs.parameters, *graph.inputs.values, *(t.node for t in graph.inputs.tokens)]
    # What a value with a gradient was computed from, autograd reads again when the branch is done.
    read += [
        given
        for node in read
        if isinstance(values[node], Tensor) and values[node].requires_grad
        for given in inputs_of(node)
    ]
    # A computed value may be a view of an input, e.g. responses[..., None], and shares its counter then.
    return {
        node.name: (names.get(_memory(value), node.name), (value._version, value.data_ptr()))
        for node, value in ((node, values[node]) for node in read)
        if isinstance(value, Tensor)
    }


def inputs_of(node: fx.Node) -> list[fx.Node]:
    """Return the step's inputs that a value is computed from; an input itself is its own."""
    stack, seen = [node], {node: None}
    while stack:
        before = [one for one in stack.pop().all_input_nodes if one not in seen]
        seen.update(dict.fromkeys(before))
        stack += before
    return [one for one in seen if one.op == "placeholder"]


def _memory(value: Any) -> int | None:
    return compat.memory(value) if isinstance(value, Tensor) else None

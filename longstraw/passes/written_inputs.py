"""What a step writes to its inputs, such as buffers of the model, as further outputs.

`return_writes`, used by trace, lets the graph write to copies and return these; `writing_back` runs the compiled step
on the inputs' old values, and copies what was returned into the inputs once the step has succeeded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from longstraw import compat
from longstraw.errors import BadInput

aten = torch.ops.aten


def return_writes(graph: fx.Graph, *, trained: frozenset[str]) -> frozenset[str]:
    """Let a graph write to copies of its inputs that need no gradient; return the names of those it writes to.

    The copies' last values are outputs of the graph, after all others and in the order of the placeholders.

    Args:
        graph: an ATen graph, changed in place.
        trained: names of the placeholders that need a gradient.
    """
    tensors = [node for node in graph.find_nodes(op="placeholder") if isinstance(node.meta.get("val"), Tensor)]
    shared = Counter(compat.memory(node.meta["val"]) for node in tensors)
    placeholders = {
        memory: node
        for node in tensors
        if node.name not in trained and shared[memory := compat.memory(node.meta["val"])] == 1
    }
    found: set[fx.Node | None] = set()
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None or not schema.is_mutable:
            continue
        value = node.args[0].meta.get("val") if isinstance(node.args[0], fx.Node) else None
        found.add(placeholders.get(compat.memory(value)) if isinstance(value, Tensor) else None)
    written = [node for node in placeholders.values() if node in found]
    output = next(iter(reversed(graph.nodes)))
    for node in written:
        with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
            copy = graph.call_function(aten.clone.default, (node,))
        node.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)
        copy.meta = dict(node.meta)  # views of the input are views of the copy
        node.meta["val"] = copy.meta["val"].clone()
        output.args = ((*output.args[0], copy),)
    return frozenset(node.name for node in written)


def writing_back(run: Callable[..., Any], written: Sequence[tuple[int, str]]) -> Callable[..., Any]:
    """Return a step whose last results go into its inputs.

    Args:
        run: the compiled step; it returns what was written after its other outputs.
        written: places and names of the inputs that it writes to.
    """

    def step(*inputs: Any, **more: Any) -> Any:
        _check_alone(inputs, written)
        before = list(inputs)
        for place, _ in written:
            before[place] = inputs[place].detach().clone()
        outputs = run(*before, **more)
        kept = len(outputs) - len(written)
        with torch.no_grad():
            for (place, _), value in zip(written, outputs[kept:], strict=True):
                inputs[place].copy_(value)
        return outputs[:kept]

    return step


def _check_alone(inputs: Sequence[Any], written: Sequence[tuple[int, str]]) -> None:
    """Refuse a written input that shares memory with another: the other's values would have to change with it."""
    tensors = [(i, x) for i, x in enumerate(inputs) if isinstance(x, Tensor)]
    for place, source in written:
        memory = inputs[place].untyped_storage().data_ptr()
        if memory and any(i != place and x.untyped_storage().data_ptr() == memory for i, x in tensors):
            raise BadInput(
                f"The step writes to {source}, which shares its memory with another of its inputs.",
                remedy="Pass it in as a tensor of its own: x.clone().",
            )

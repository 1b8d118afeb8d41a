"""Which tensors of a graph are one number repeated, and which number.

Such a tensor has nothing of the values that it was made like: `zeros_like(hidden)[..., 0]` is known from sizes alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from longstraw.arch.rules import arguments, packet
from longstraw.compat import expression

aten = torch.ops.aten
_THROUGH = (
    *(aten.to, aten._to_copy, aten.clone, aten.contiguous, aten.alias, aten.type_as, aten.detach),
    *(aten.unsqueeze, aten.squeeze, aten.view, aten.reshape, aten._unsafe_view, aten.expand),
    *(aten.lift_fresh_copy, aten.lift_fresh),
)
_FILLED = {
    **dict.fromkeys((aten.ones, aten.ones_like, aten.new_ones), 1),
    **dict.fromkeys((aten.zeros, aten.zeros_like, aten.new_zeros), 0),
}
_FULL = {aten.scalar_tensor: 0, aten.full: 1, aten.full_like: 1, aten.new_full: 2}
"""Ops that fill a tensor with the argument at this place."""
_EMPTY = (aten.empty, aten.empty_like, aten.new_empty)


def filled_with(value: Any) -> float | None:
    """Return the number that a node's tensor consists of (a number is returned itself), or None."""
    while isinstance(value, fx.Node) and packet(value.target) in _THROUGH:
        value = value.args[0]
    if isinstance(value, fx.Node) and value.op == "get_attr":
        tensor = getattr(value.graph.owning_module, str(value.target))
        return float(tensor) if isinstance(tensor, torch.Tensor) and tensor.ndim == 0 else None
    if isinstance(value, fx.Node):
        name = packet(value.target)
        value = _FILLED.get(name) if name in _FILLED else value.args[_FULL[name]] if name in _FULL else None
    return None if isinstance(value, fx.Node) else value


def is_new(node: fx.Node) -> bool:
    """Return whether an op makes a tensor that has nothing of its operands but their sizes."""
    return packet(node.target) in (*_FILLED, *_FULL, *_EMPTY)


def fill_by_size(graph: fx.Graph) -> None:
    """Write a part taken from a tensor of one number as `full`, where the graph has its sizes."""
    sizes: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            sizes.setdefault(expression(value), node)
        if node.op != "call_function" or packet(node.target) is not aten.select:
            continue
        source = arguments(node)["self"]
        number = filled_with(source) if packet(source.target) in (*_FILLED, *_FULL) else None
        shape = [int(e) if e.is_Integer else sizes.get(e) for e in map(expression, value.shape)]
        if number is None or None in shape:
            continue
        with graph.inserting_before(node):
            new = graph.call_function(
                aten.full.default, (shape, number), {"dtype": value.dtype, "device": value.device}
            )
        new.meta = {**node.meta}
        node.replace_all_uses_with(new)
        graph.erase_node(node)

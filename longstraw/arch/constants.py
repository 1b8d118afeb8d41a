"""Which tensors of a graph are one number repeated, and which number."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from longstraw.arch.rules import packet

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

"""Python floats that change from call to call, such as an annealed coefficient: one graph for all their values.

Dynamo makes a float symbolic when it differs from the last call's. Computing with it stays Python arithmetic, done once
in a step. Where it meets a tensor it becomes a tensor of one number, which every later pass knows from users who pass
one. Ops that this isn't written out for are refused, and the float is traced as a constant instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from longstraw import compat
from longstraw.arch.rules import arguments, emit, op_name, packet
from longstraw.errors import UnsupportedOp, user_line

aten = torch.ops.aten
_BINARY = {
    **{getattr(aten, name): getattr(aten, name).Tensor for name in ("add", "mul", "div", "gt", "ge", "lt", "le")},
    **{getattr(aten, name): getattr(aten, name).Tensor for name in ("eq", "ne", "sub")},
    aten.rsub: aten.sub.Tensor,
    aten.pow: aten.pow.Tensor_Tensor,
}
_CLAMPS = (aten.clamp, aten.clip, aten.clamp_min, aten.clamp_max)


def changing_numbers_as_tensors(graph: fx.Graph) -> None:
    """Give tensors in place of floats that change to every op on tensors that takes one."""
    for node in list(graph.nodes):
        if not any(isinstance(x.meta.get("val"), torch.SymFloat) for x in node.all_input_nodes):
            continue
        node.args, node.kwargs = map_arg((node.args, node.kwargs), _constant)
        computes = node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor)
        if not any(map(_changes, node.all_input_nodes)) or (node.op == "call_function" and not computes):
            continue
        new = None
        if computes and packet(node.target) is not aten.scalar_tensor:
            with graph.inserting_before(node):
                new = _Writer(graph, node).written()
        elif computes:
            continue
        before: Any = node.meta.get("val")
        after: Any = None if new is None else new.meta["val"]
        if new is None or (before.dtype, before.device, before.shape) != (after.dtype, after.device, after.shape):
            raise UnsupportedOp(
                f"{op_name(node)} takes a Python float that changes from call to call.",
                where=user_line(node.meta.get("stack_trace")),
                remedy="Pass it as a tensor of no dims.",
            )
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def _changes(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.SymFloat)


def _constant(node: fx.Node) -> Any:
    """Return the number in place of a float that the trace has taken for a constant, and any other node itself."""
    known = compat.known_number(node.meta["val"]) if _changes(node) else None
    return node if known is None else known


class _Writer:
    """Writes one op with tensors.

    Args:
        graph: where, at its insertion point.
        node: the op with numbers.
    """

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        self._graph, self._node = graph, node
        self._result: torch.Tensor = node.meta["val"]

    def written(self) -> fx.Node | None:
        """Return the op with tensors in place of numbers; None for one that isn't known."""
        node, name = self._node, packet(self._node.target)
        if not hasattr(node.target, "_schema"):
            return None
        a = arguments(node)
        if name in _BINARY and "rounding_mode" not in a:
            one, other = a["self"], a["exponent" if name is aten.pow else "other"]
            if a.get("alpha", 1) != 1:
                other = self._with_number(aten.mul.Tensor, other, a["alpha"])
            return self._with_number(_BINARY[name], *((other, one) if name is aten.rsub else (one, other)))
        if name in _CLAMPS:
            low, high = (None if a.get(key) is None else self._like_result(a[key]) for key in ("min", "max"))
            return self._emit(aten.clamp.Tensor, a["self"], low, high)
        if name is aten.where:
            return self._emit(aten.where.self, a["condition"], *(self._like_result(a[k]) for k in ("self", "other")))
        if name is aten.masked_fill:
            return self._emit(aten.masked_fill.Tensor, a["self"], a["mask"], self._like_result(a["value"]))
        return None

    def _emit(self, op: Any, *args: Any) -> fx.Node:
        return emit(self._graph, self._node, op, *args)

    def _with_number(self, op: Any, one: Any, other: Any) -> fx.Node:
        """Return an op of a tensor and a number, on either side.

        A tensor of one number in float64 has a number's part in choosing a result's dtype, if the other is a float
        tensor with dims. It lies on the CPU like a number that PyTorch wraps.
        """
        if all(isinstance(x, fx.Node) and isinstance(x.meta["val"], torch.Tensor) for x in (one, other)):
            return self._emit(op, one, other)
        operands = [self._beside_a_number(x) for x in (one, other)]
        new = self._emit(op, *operands)
        return self._emit(aten.squeeze.dim, new, 0) if new.meta["val"].ndim > self._result.ndim else new

    def _beside_a_number(self, x: Any) -> fx.Node:
        if not isinstance(x, fx.Node) or not isinstance(x.meta["val"], torch.Tensor):
            return self._tensor(x, torch.float64, torch.device("cpu"))
        value = x.meta["val"]
        if not (value.is_floating_point() or value.is_complex()):
            x = self._emit(aten.to.dtype, x, torch.result_type(value, 1.0))
        return x if value.ndim else self._emit(aten.unsqueeze.default, x, 0)

    def _like_result(self, x: Any) -> fx.Node:
        is_tensor = isinstance(x, fx.Node) and isinstance(x.meta["val"], torch.Tensor)
        return x if is_tensor else self._tensor(x, self._result.dtype, self._result.device)

    def _tensor(self, number: Any, dtype: torch.dtype, device: torch.device) -> fx.Node:
        """Return a number as a tensor. Its fake value is made without the number, which would become a constant."""
        kwargs: dict[str, Any] = {"dtype": dtype, "device": device}
        node = self._graph.call_function(aten.scalar_tensor.default, (number,), kwargs)
        with compat.fake_mode(self._result):
            node.meta = {**self._node.meta, "val": torch.empty((), dtype=dtype, device=device)}
        return node

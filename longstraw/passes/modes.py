"""Grad mode and autocast inside the step: normalise resolves their switches, finished graphs get autocast's back."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from longstraw import compat
from longstraw.passes.functional import is_its_operand

aten = torch.ops.aten


def resolve_modes(graph: fx.Graph) -> None:
    """Turn grad-mode switches into `detach`, and autocast switches into `meta["autocast"]`.

    An op that hands back its operand itself, as a cast that changes nothing does, is that operand, gradient and all:
    also under no_grad, and the trace takes it for the operand wherever that is used later.
    """
    grad = True
    casts: list[tuple[Any, ...]] = []
    switches: list[fx.Node] = []
    frozen: dict[fx.Node, None] = {}
    for node in list(graph.nodes):
        name = getattr(node.target, "__name__", "")
        if node.op == "call_function" and node.target is torch._C._set_grad_enabled:
            grad = bool(node.args[0])
            switches.append(node)
        elif node.op == "call_function" and name == "_enter_autocast":
            device, dtype, enabled = node.args[:3]
            casts.append((device, bool(enabled), dtype or torch.get_autocast_dtype(device)))
            switches.append(node)
        elif node.op == "call_function" and name == "_exit_autocast":
            casts.pop()
            switches.append(node)
        else:
            node.meta["autocast"] = tuple(casts)
            operand = is_its_operand(node)
            if operand is not None:
                node.replace_all_uses_with(operand)
            elif not grad and node.op == "call_function":
                frozen[node] = None
    for node in reversed(switches):
        graph.erase_node(node)
    for node in frozen:
        value = node.meta.get("val")
        outside = [user for user in node.users if user not in frozen]
        if not isinstance(value, torch.Tensor) or not outside or not value.is_floating_point():
            continue
        with graph.inserting_after(node):
            cut = graph.call_function(aten.detach.default, (node,))
        cut.meta = dict(node.meta)
        for user in outside:
            user.replace_input_with(node, cut)


def restore_autocast(module: fx.GraphModule) -> fx.GraphModule:
    """Insert the autocast switches that nodes were traced under; return the module, recompiled.

    A node's `meta["autocast"]` is the nesting it was traced under, outermost first, each `(device, enabled, dtype)`.
    Nodes without it (size arithmetic) run under whatever is in force.
    """
    graph = module.graph
    opened: list[tuple[Any, fx.Node]] = []
    for node in list(graph.nodes):
        if node.op == "output":
            wanted: tuple[Any, ...] = ()
        elif node.op == "call_function" and "autocast" in node.meta:
            wanted = node.meta["autocast"]
        else:
            continue
        if tuple(state for state, _ in opened) == wanted:
            continue
        with graph.inserting_before(node):
            while opened and tuple(state for state, _ in opened) != wanted[: len(opened)]:
                graph.call_function(compat.exit_autocast, (opened.pop()[1],))
            for state in wanted[len(opened) :]:
                opened.append((state, graph.call_function(compat.enter_autocast, state)))
    module.recompile()
    return module

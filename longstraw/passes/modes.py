"""Grad mode and autocast inside the step: normalise resolves their switches, finished graphs get autocast's back."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from longstraw import compat
from longstraw.passes.functional import is_its_operand

aten = torch.ops.aten


def resolve_dtypes(graph: fx.Graph) -> None:
    """Give every node the fake value that it has under autocast: the trace is made before autocast acts.

    Autocast that surrounds the compiled step is in force while it is compiled, and Dynamo guards it. Only nodes whose
    dtype changes, and what follows from them, get another value.
    """
    if not _meets_autocast(graph):
        return
    changed: set[fx.Node] = set()
    with contextlib.ExitStack() as opened:
        switches: list[contextlib.ExitStack] = []
        for node in graph.nodes:
            name = getattr(node.target, "__name__", "")
            if name == "_enter_autocast":
                switches.append(contextlib.ExitStack())
                opened.push(switches[-1])
                switches[-1].enter_context(compat.autocast_state((_entered(node),)))
            elif name == "_exit_autocast":
                switches.pop().close()
            elif node.op == "call_function" and _tensors(node.meta.get("val")):
                args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
                with torch.no_grad(), compat.fake_mode(node.meta["val"]):
                    value = node.target(*args, **kwargs)
                if _dtypes(value) != _dtypes(node.meta["val"]) or not changed.isdisjoint(node.all_input_nodes):
                    node.meta["val"] = value
                    changed.add(node)


def _meets_autocast(graph: fx.Graph) -> bool:
    devices = {x.device.type for node in graph.nodes for x in _tensors(node.meta.get("val"))}
    return any(enabled for device in devices for _, enabled, _ in compat.current_autocast(device)) or any(
        getattr(node.target, "__name__", "") == "_enter_autocast" for node in graph.nodes
    )


def _dtypes(value: Any) -> list[torch.dtype]:
    return [x.dtype for x in _tensors(value)]


def _tensors(value: Any) -> list[torch.Tensor]:
    return [x for x in compat.tree_leaves(value) if isinstance(x, torch.Tensor)]


def _entered(node: fx.Node) -> tuple[str, bool, torch.dtype]:
    device, dtype, enabled = node.args[:3]
    return device, bool(enabled), dtype or torch.get_autocast_dtype(device)  # type: ignore[arg-type,return-value]


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
            casts.append(_entered(node))
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
        learns = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
        if not learns or not outside:
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

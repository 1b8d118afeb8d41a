"""Autocast inside the step: normalise moves it into node metadata, and finished graphs get their switches back."""

from __future__ import annotations

from typing import Any

from torch import fx

from longstraw import compat


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

"""Which values of a step a gradient flows through, told from its graph."""

from __future__ import annotations

from collections.abc import Container, Iterable

import torch
from torch import fx

from longstraw.arch.constants import is_new
from longstraw.arch.rules import packet

aten = torch.ops.aten


def flow(graph: fx.Graph, *, trained: frozenset[str]) -> frozenset[fx.Node]:
    """Return the nodes on a way from something trained to an output, `detach` and ints being in no way's middle.

    Every value that eager gives a gradient is among them; of those that it doesn't, a few may be (one whose op's
    derivative is zero everywhere).

    Args:
        graph: functional, without grad-mode switches.
        trained: names of the placeholders that need a gradient.
    """
    needs: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            learns = node.name in trained
        else:
            learns = node.op != "output" and _passes(node) and any(x in needs for x in node.all_input_nodes)
        if learns:
            needs.add(node)
    return _back(next(iter(reversed(graph.nodes))).all_input_nodes, needs)


def before(node: fx.Node, learns: frozenset[fx.Node]) -> frozenset[fx.Node]:
    """Return the nodes that gradients reach through a node, itself included; none where it gets no gradient itself.

    Args:
        node: any node of the graph.
        learns: what `flow` found in it.
    """
    return _back([node], learns)


def _back(nodes: Iterable[fx.Node], among: Container[fx.Node]) -> frozenset[fx.Node]:
    """Return the nodes on ways back from some, through nothing but those among others."""
    found: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node in among and node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return frozenset(found)


def _passes(node: fx.Node) -> bool:
    """Return whether an op hands gradients on to its operands."""
    value = node.meta.get("val")
    discrete = isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())
    return not discrete and packet(node.target) is not aten.detach and not is_new(node)

"""Passes of one model over the same tokens become one pass. Used by find_branches.

A step that scores the old policy with the weights that it trains runs the model twice on the same rows, once under
no_grad. The hidden values are the same, so one pass computes them, and only what the two make of them in the end (other
temperatures, an entropy beside a log-probability) is computed for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from longstraw.arch.rules import packet

aten = torch.ops.aten
Branch = tuple[fx.Node, ...]


def merge_same_passes(
    module: fx.GraphModule, branches: Sequence[Branch], learns: frozenset[fx.Node], *, mixes: Callable[[fx.Node], bool]
) -> tuple[tuple[Branch, ...], tuple[int, ...]]:
    """Join branches whose ops across tokens are the same; return the branches, and for each how many it stands for.

    Args:
        module: the step's graph, functional; changed in place, and ordered anew.
        branches: its passes over the tokens.
        learns: the nodes that gradients flow through.
        mixes: whether a node reads other tokens.
    """
    graph = module.graph
    left, counts, nodes = list(branches), dict.fromkeys(branches, 1), {branch: branch for branch in branches}
    if len(left) < 2:
        return tuple(left), (1,) * len(left)
    strict, values = _numbers(module, through_detach=False), _numbers(module, through_detach=True)
    dropped: set[fx.Node] = set()
    for one in branches:
        for other in branches:
            if one is other or one not in left or other not in left:
                continue
            twins = _twins(nodes[one], nodes[other], learns, strict, values)
            across = [node for node in nodes[one] if mixes(node)]
            if across and all(node in twins for node in across):
                cuts = _replace(graph, twins, learns)
                dropped.update(twins)
                nodes[other] += (*cuts, *(node for node in nodes[one] if node not in twins))
                counts[other] += counts[one]
                left.remove(one)
    if dropped:
        _put_in_order(graph)
        for node in reversed(list(graph.nodes)):
            if node in dropped:
                graph.erase_node(node)
    order = {node: place for place, node in enumerate(graph.nodes)}
    merged = tuple(tuple(sorted(nodes[branch], key=order.__getitem__)) for branch in left)
    return merged, tuple(counts[branch] for branch in left)


def _twins(
    one: Branch,
    other: Branch,
    learns: frozenset[fx.Node],
    strict: dict[fx.Node, int],
    values: dict[fx.Node, int],
) -> dict[fx.Node, fx.Node]:
    """Return for nodes of one branch those of the other that can stand for them.

    A node that gradients flow through needs one that they flow through in the same way. For others the value is enough.
    """
    learning = {strict[node]: node for node in other if node in learns}
    known = {values[node]: node for node in other if node in values}
    found: dict[fx.Node, fx.Node] = {}
    inside = set(one)
    for node in one:
        several = not isinstance(node.meta.get("val"), torch.Tensor) and not inside.issuperset(node.users)
        twin = learning.get(strict[node]) if node in learns else known.get(values.get(node, -1))
        if twin is not None and (node in learns or not several):
            found[node] = twin
    return found


def _replace(graph: fx.Graph, twins: dict[fx.Node, fx.Node], learns: frozenset[fx.Node]) -> list[fx.Node]:
    """Let what reads a node and stays read its twin: detached, where no gradient flowed; return the new `detach`es."""
    cuts: dict[fx.Node, fx.Node] = {}
    for node, twin in twins.items():
        value = node.meta.get("val")
        cut = (
            node not in learns and isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
        )
        for user in [user for user in node.users if user not in twins]:
            if cut and twin not in cuts:
                with graph.inserting_after(twin):
                    cuts[twin] = graph.call_function(aten.detach.default, (twin,))
                cuts[twin].meta = dict(twin.meta)
            user.replace_input_with(node, cuts[twin] if cut else twin)
    return list(cuts.values())


def _numbers(module: fx.GraphModule, *, through_detach: bool) -> dict[fx.Node, int]:
    """Return a number for every node: the same one for nodes that have the same value in every run.

    Args:
        module: a functional graph.
        through_detach: whether `detach(x)` is x.
    """
    numbers: dict[fx.Node, int] = {}
    known: dict[Any, int] = {}
    for node in module.graph.nodes:
        if node.op == "output":
            continue
        if through_detach and packet(node.target) is aten.detach:
            numbers[node] = numbers[node.args[0]]
            continue
        key = _key(module, node, numbers)
        numbers[node] = len(numbers) if key is None else known.setdefault(key, len(numbers))
    return numbers


def _key(module: fx.GraphModule, node: fx.Node, numbers: dict[fx.Node, int]) -> Any:
    """Return what a node's value depends on; None where another node's may differ although this is equal."""
    if node.op == "get_attr":
        held: Any = module
        for name in str(node.target).split("."):
            held = getattr(held, name)
        return _structure(held) if isinstance(held, fx.GraphModule) else ("held", id(held))
    if node.op != "call_function":
        return None
    tags = getattr(node.target, "tags", ())
    schema = getattr(node.target, "_schema", None)
    if torch.Tag.nondeterministic_seeded in tags or (schema is not None and schema.is_mutable):
        return None
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: _Value(numbers[n]))
    return (node.target, hashable(args), hashable(kwargs), node.meta.get("autocast"))


def _structure(function: fx.GraphModule) -> Any:
    """Return what a function computes, whatever its values are called."""
    numbers: dict[fx.Node, int] = {}
    keys = []
    for number, node in enumerate(function.graph.nodes):
        if node.op == "output":
            keys.append(hashable(map_arg(node.args, lambda n: _Value(numbers[n]))))
        else:
            keys.append("input" if node.op == "placeholder" else _key(function, node, numbers))
            numbers[node] = number
    return None if None in keys else tuple(keys)


class _Value(int):
    """The number of a node, told apart from a constant by its type."""


def hashable(value: Any) -> Any:
    """Return a structure of constants as one that can be compared; 1, 1.0 and True differ."""
    if isinstance(value, dict):
        return tuple((key, hashable(x)) for key, x in sorted(value.items()))
    if isinstance(value, list | tuple):
        return tuple(hashable(x) for x in value)
    if isinstance(value, slice):
        return ("slice", hashable((value.start, value.stop, value.step)))
    return (type(value), repr(value) if isinstance(value, float) else value)


def _put_in_order(graph: fx.Graph) -> None:
    """Move nodes behind what they read, the order left as it was otherwise."""
    last = next(iter(reversed(graph.nodes)))
    done: set[fx.Node] = set()
    for first in list(graph.nodes):
        stack = [first]
        while stack:
            node = stack[-1]
            missing = [x for x in node.all_input_nodes if x not in done]
            if node in done or not missing:
                stack.pop()
                if node not in done and node is not last:
                    done.add(node)
                    last.prepend(node)
            else:
                stack += reversed(missing)

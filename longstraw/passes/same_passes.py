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
    dropped: set[fx.Node] = set()
    if len(left) < 2:
        return tuple(left), (1,) * len(left)
    strict, values = _numbers(module, through_detach=False), _numbers(module, through_detach=True)
    for one in branches:
        for other in left:
            if one is other or one not in left:
                continue
            same = strict if not learns.isdisjoint(one) else values
            twins = {same[node]: node for node in nodes[other]}
            across = [node for node in one if mixes(node)]
            if not across or not all(same[node] in twins for node in across):
                continue
            known = [node for node in one if same[node] in twins]
            for node in known:
                node.replace_all_uses_with(twins[same[node]])
            dropped.update(known)
            nodes[other] += tuple(node for node in one if same[node] not in twins)
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
    return (node.target, _hashable(args), _hashable(kwargs), node.meta.get("autocast"))


def _structure(function: fx.GraphModule) -> Any:
    """Return what a function computes, whatever its values are called."""
    numbers: dict[fx.Node, int] = {}
    keys = []
    for number, node in enumerate(function.graph.nodes):
        if node.op == "output":
            keys.append(_hashable(map_arg(node.args, lambda n: _Value(numbers[n]))))
        else:
            keys.append("input" if node.op == "placeholder" else _key(function, node, numbers))
            numbers[node] = number
    return None if None in keys else tuple(keys)


class _Value(int):
    """The number of a node, told apart from a constant by its type."""


def _hashable(value: Any) -> Any:
    """Return a structure of constants as one that can be compared; 1, 1.0 and True differ."""
    if isinstance(value, dict):
        return tuple((key, _hashable(x)) for key, x in sorted(value.items()))
    if isinstance(value, list | tuple):
        return tuple(_hashable(x) for x in value)
    if isinstance(value, slice):
        return ("slice", _hashable((value.start, value.stop, value.step)))
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

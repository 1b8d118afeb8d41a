"""Loops over pieces of a dim become one computation of the whole. Used by normalise.

People compute log-probabilities row by row, or a few tokens at a time, to save memory: Python unrolls such a loop, so
the graph holds k copies of its body. Where a `stack` or a `cat` joins what k copies of the same ops make of the k
consecutive pieces of a dim, in their order, the ops are applied to the whole dim instead; `arch/piece_rules.py` says
which ops can be. Anything else is left as it is: pieces of rows and tokens are then refused.
"""

from __future__ import annotations

import operator
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.node import map_arg

from longstraw.arch.piece_rules import is_pure, rule_for, sizes_asked
from longstraw.arch.pieces import PieceOp, Unlike, Whole, is_whole, rank_of, shape_of
from longstraw.arch.rules import arguments, emit, packet
from longstraw.compat import expression
from longstraw.passes.same_passes import hashable

aten = torch.ops.aten
_SPLITS = (aten.split, aten.split_with_sizes, aten.chunk, aten.tensor_split)
Nodes = tuple[fx.Node, ...]


def reroll(graph: fx.Graph) -> None:
    """Compute what loops over pieces make of all pieces at once.

    Args:
        graph: a functional graph without grad-mode switches; what is used no more stays in it.
    """
    loops = _Loops(graph)
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if packet(node.target) in (aten.stack, aten.cat):
            found = loops.joined(node)
        else:
            found = node.args[0].args[0] if _is_only_piece(node) else None
        if found is not None:
            node.replace_all_uses_with(found)


def _is_only_piece(node: fx.Node) -> bool:
    """Return whether a node is all that a split of a dim, shorter than one piece, gives."""
    if node.target is not operator.getitem:
        return False
    split = node.args[0]
    return isinstance(split, fx.Node) and packet(split.target) in _SPLITS and len(split.meta["val"]) == 1


class _Loops:
    """Finds the one value in place of k.

    Args:
        graph: new nodes are inserted into it.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.found: dict[Nodes, Whole | fx.Node | None] = {}

    def joined(self, join: fx.Node) -> fx.Node | None:
        """Return the value of a `stack` or `cat`, computed at once; None where its operands are no loop's results."""
        a = arguments(join)
        parts: Nodes = tuple(a["tensors"])
        if len(set(parts)) < 2 or len({part.target for part in parts}) > 1 or _cut(parts) is not None:
            return None
        with self.graph.inserting_before(join):
            whole = self._whole(parts)
            if not isinstance(whole, Whole):
                return None
            dim = a["dim"] % len(shape_of(join))
            if packet(join.target) is aten.stack:
                node = whole.node if whole.dim is None and dim == 0 else None
            elif whole.dim is None:
                node = emit(self.graph, join, aten.flatten.using_ints, whole.node, 0, 1) if dim == 0 else None
            else:
                node = whole.node if whole.dim == dim else None
        if node is None or shape_of(node) != shape_of(join) or node.meta["val"].dtype != join.meta["val"].dtype:
            return None
        return node

    def _whole(self, parts: Nodes) -> Whole | fx.Node | None:
        """Return what stands for the values that the passes through a loop have at one place; None if nothing does."""
        stack = [parts]
        while stack:
            nodes = stack[-1]
            if nodes in self.found:
                stack.pop()
                continue
            operands = self._operands(nodes)
            missing = [x for x in operands or () if x not in self.found]
            if missing:
                stack += missing
                continue
            stack.pop()
            if operands is not None:
                self.found[nodes] = self._applied(nodes, operands)
        return self.found[parts]

    def _operands(self, nodes: Nodes) -> tuple[Nodes, ...] | None:
        """Return the operands that a rule needs; None where what stands for the nodes is found without one."""
        first = nodes[0]
        if all(node is first for node in nodes):
            self.found[nodes] = first
            return None
        cut = _cut(nodes)
        if cut is not None:
            self.found[nodes] = self._source(nodes, *cut)
            return None
        values = [node.meta.get("val") for node in nodes]
        if all(isinstance(value, (int, torch.SymInt)) for value in values):
            same = all(expression(value) == expression(values[0]) for value in values)
            self.found[nodes] = first if same else None
            return None
        if any(_key(node) != _key(first) for node in nodes) or first.op != "call_function":
            self.found[nodes] = None
            return None
        return tuple(zip(*(_operands(node) for node in nodes), strict=True))

    def _source(self, nodes: Nodes, source: fx.Node, dim: int, sizes: tuple[sympy.Expr, ...]) -> Whole | None:
        if rank_of(nodes[0]) < rank_of(source):
            return Whole(source, None, sizes) if dim == 0 else None
        if dim == 0 and set(sizes) == {1}:
            return Whole(emit(self.graph, nodes[0], aten.unsqueeze.default, source, 1), None, sizes)
        return Whole(source, dim, sizes)

    def _applied(self, nodes: Nodes, operands: tuple[Nodes, ...]) -> Whole | fx.Node | None:
        known: dict[fx.Node, Any] = {x[0]: self.found[x] for x in operands}
        if len(known) < len(set(operands)) or None in known.values():
            return None
        if not any(isinstance(x, Whole) for x in known.values()):
            return nodes[0] if _computes_the_same(nodes) else None
        try:
            op = PieceOp(nodes, known)
            whole = rule_for(nodes[0].target)(op)
        except Unlike:
            return None
        return whole if is_whole(op, whole) else None


def _computes_the_same(nodes: Nodes) -> bool:
    """Return whether an op has the same value in every pass through a loop, given operands that do."""
    if not is_pure(nodes[0].target):
        return False
    return not sizes_asked(nodes[0]) or all(shape_of(node) == shape_of(nodes[0]) for node in nodes)


def _operands(node: fx.Node) -> list[fx.Node]:
    """Return the nodes in a node's arguments as they stand there, but for the sizes of a view."""
    found: list[fx.Node] = []
    map_arg(node.args[:1] if sizes_asked(node) else (node.args, node.kwargs), found.append)
    return found


def _key(node: fx.Node) -> Any:
    """Return what must be the same in all passes through a loop: the op, its modes, and all but the nodes it reads."""
    places = len(sizes_asked(node)) or (node.args, node.kwargs)
    constants = hashable(map_arg(places, lambda n: _OPERAND))
    return node.op, node.target, list(node.kwargs), node.meta.get("autocast"), constants


_OPERAND = "\0"  # no constant of an op


def _cut(nodes: Nodes) -> tuple[fx.Node, int, tuple[sympy.Expr, ...]] | None:
    """Return the source, the dim and the pieces' sizes where nodes are all consecutive pieces of a dim, in order."""
    first = nodes[0]
    source = first.args[0] if first.op == "call_function" and first.args else None
    if not isinstance(source, fx.Node):
        return None
    if any(
        node.op != "call_function" or node.target is not first.target or node.args[0] is not source for node in nodes
    ):
        return None
    if first.target is operator.getitem:
        return _split(nodes, source)
    if first.target in (aten.select.int, aten.slice.Tensor, aten.narrow.default):
        return _taken(nodes, source)
    return None


def _split(nodes: Nodes, split: fx.Node) -> tuple[fx.Node, int, tuple[sympy.Expr, ...]] | None:
    if packet(split.target) not in (*_SPLITS, aten.unbind) or len(split.meta["val"]) != len(nodes):
        return None
    if any(node.args[1] != i for i, node in enumerate(nodes)):
        return None
    a = arguments(split)
    source = a["self"]
    dim = a["dim"] % rank_of(source)
    if packet(split.target) is aten.unbind:
        return source, dim, (sympy.Integer(1),) * len(nodes)
    return source, dim, tuple(shape_of(node)[dim] for node in nodes)


def _taken(nodes: Nodes, source: fx.Node) -> tuple[fx.Node, int, tuple[sympy.Expr, ...]] | None:
    asked = [arguments(node) for node in nodes]
    dims = {a["dim"] % rank_of(source) for a in asked}
    if len(dims) > 1:
        return None
    dim = dims.pop()
    whole = shape_of(source)[dim]
    if nodes[0].target is aten.select.int:
        sizes = (sympy.Integer(1),) * len(nodes)
        starts = [a["index"] for a in asked]
    else:
        sizes = tuple(shape_of(node)[dim] for node in nodes)
        starts = [0 if a["start"] is None else a["start"] for a in asked]
        if any(a.get("step", 1) != 1 for a in asked):
            return None
    at = sympy.Integer(0)
    for start, size in zip(starts, sizes, strict=True):
        begin = expression(start.meta["val"] if isinstance(start, fx.Node) else start)
        if sympy.expand((begin + whole if begin.is_negative else begin) - at) != 0:
            return None
        at += size
    return (source, dim, sizes) if sympy.expand(at - whole) == 0 else None

"""Which entries of its results a step reads: those that no zero of a mask cuts off. Used by partition.

A loss multiplies what it computes of each token by a mask, and sums. An entry of a result that meets nothing but zeros
of such factors (padding, a row whose advantage is zero) changes nothing and need not be computed. Where factors are
known before the model runs, what is read can be told from the objective's graph and its inputs.

Every result has a *mark*, ones of its shape, which goes the way that its numbers go. An op that is elementwise hands on
the sum of its operands' marks; a factor that no result has a part in, or such a condition of a `where`, stops marks
where it is zero; views, joins, sums and means do to marks what they do to numbers. At any other op marks end, as they
do at the outputs and where they meet what came of such an op. The gradient of the sum of all ended marks with respect
to a mark is zero exactly where that result is not read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from longstraw import compat
from longstraw.arch import aten as aten_rules
from longstraw.arch import views
from longstraw.arch.rules import packet, tensors
from longstraw.passes.modes import restore_autocast
from longstraw.passes.trace import drop_unused

aten = torch.ops.aten
_MOVES = (
    views.reshaped,
    views.permuted,
    views.expanded,
    views.sliced,
    views.selected,
    views.repeat_interleave,
)
"""Rules of ops that put entries elsewhere."""


def find_reads(objective: fx.GraphModule, num_results: int, trained: frozenset[str]) -> fx.GraphModule | None:
    """Return what tells which entries are read, or None where nothing cuts off any.

    Args:
        objective: `(*inputs, *results) -> outputs`.
        num_results: how many results it has.
        trained: names of its inputs that need a gradient. What depends on them cuts nothing off: a factor's own
            gradient is what it is multiplied with, be the factor zero or not.

    Returns:
        `(*inputs, *blanks, *marks) -> (ended marks, cut values)`. Blanks stand for the results; an entry is left out
        only where the cut values and their gradients with respect to the blanks are finite, for the blank then stands
        in the objective, too.
    """
    marking = _Marking(objective, num_results, trained)
    found = marking.run()
    return found if marking.cut else None


class _Marking:
    """Copies an objective and adds the marks of its results.

    Attributes:
        cut: what is multiplied by factors or chosen by conditions, in the copy.
    """

    def __init__(self, objective: fx.GraphModule, num_results: int, trained: frozenset[str]) -> None:
        self._objective = objective
        self._given = [node for node in objective.graph.nodes if node.op == "placeholder"]
        self._results = self._given[len(self._given) - num_results :]
        self._graph = fx.Graph()
        self._copies: dict[Any, fx.Node] = {}
        self._marks: dict[Any, fx.Node] = {}
        self._ended: dict[fx.Node, None] = {}
        self.cut: dict[fx.Node, None] = {}
        self._unknown = _reached(objective.graph, lambda node: node.name in trained or _is_random(node))
        self._dependent = _reached(objective.graph, lambda node: node in self._results)

    def run(self) -> fx.GraphModule:
        """Send every mark on its way; return the graph of what they come to."""
        for node in self._given:
            self._copies[node] = self._graph.node_copy(node)
        for i, node in enumerate(self._results):
            self._marks[node] = self._graph.placeholder(f"mark_{i}")
        for node in [node for node in self._objective.graph.nodes if node.op != "placeholder"]:
            marked = [x for x in node.all_input_nodes if x in self._marks]
            if node.target in (compat.enter_autocast, compat.exit_autocast):
                continue
            if node.op != "output":
                self._copies[node] = self._graph.node_copy(node, self._copies.__getitem__)
            if marked and packet(node.target) not in _SIZES:
                mark = self._after(node, marked)
                if mark is None:
                    self._ended.update((self._marks[x], None) for x in marked)
                else:
                    self._marks[node] = mark
        self._graph.output((tuple(self._ended), tuple(self.cut)))
        drop_unused(self._graph)
        return restore_autocast(fx.GraphModule(self._objective, self._graph))

    def _after(self, node: fx.Node, marked: Sequence[fx.Node]) -> fx.Node | None:
        """Return the mark of an op's result, or None where marks end."""
        name = packet(node.target)
        rule = aten_rules.RULES.get(name) if node.op == "call_function" else None
        if not _is_tensor(node) or _changes_device(node):
            return None
        if any(x in self._dependent and x not in self._marks and _is_tensor(x) for x in node.all_input_nodes):
            return None
        if name in (aten.cat, aten.stack):
            return self._joined(node)
        if (rule in _MOVES and _dtype(node) == _dtype(marked[0])) or name in (aten.sum, aten.mean):
            return self._moved(node) if marked == [node.args[0]] else None
        if node in self._unknown or not (aten_rules.is_pointwise(node.target) or rule in _ELEMENTWISE):
            return None
        marks = self._cut(node) or [self._marks[x] for x in marked]
        if len(marks) == 1 and len(marked) == 1 and _shape(node) == _shape(marked[0]):
            return marks[0]
        return self._sum(node, marks)

    def _moved(self, node: fx.Node) -> fx.Node:
        """Do to a mark what an op does to numbers, but for their dtype; where it takes their mean, add marks up."""
        kwargs = {key: self._copied(value) for key, value in node.kwargs.items() if key != "dtype"}
        target = _SUMS.get(node.target, node.target)
        return self._call(target, self._marks[node.args[0]], *map(self._copied, node.args[1:]), **kwargs)

    def _joined(self, node: fx.Node) -> fx.Node:
        """Join marks; what has none counts as zeros."""
        parts = [self._marks.get(x) or self._zeros(x) for x in tensors(node.args[0])]
        return self._call(node.target, parts, *node.args[1:], **node.kwargs)

    def _zeros(self, like: fx.Node) -> fx.Node:
        return self._call(aten.zeros_like.default, self._copies[like], dtype=torch.float32)

    def _copied(self, argument: Any) -> Any:
        return map_arg(argument, self._copies.__getitem__)

    def _cut(self, node: fx.Node) -> list[fx.Node]:
        """Return the marks that a factor or a condition lets through; none where an op has neither."""
        name, operands = packet(node.target), list[Any](node.args)
        if name is aten.mul:
            value, factor = sorted(operands[:2], key=lambda x: x not in self._marks)
            if isinstance(factor, fx.Node) and _is_tensor(factor) and factor not in self._marks:
                return [self._stopped(value, self._call(aten.ne.Scalar, self._copies[factor], 0))]
        elif name is aten.where and len(operands) == 3 and operands[0] not in self._marks:
            condition, one, other = operands
            yes = self._copies[condition]
            sides = ((one, yes), (other, self._call(aten.logical_not.default, yes)))
            return [self._stopped(value, through) for value, through in sides if value in self._marks]
        elif name is aten.masked_fill and not {operands[1], operands[2]} & self._marks.keys():
            return [self._stopped(operands[0], self._call(aten.logical_not.default, self._copies[operands[1]]))]
        return []

    def _stopped(self, value: Any, through: fx.Node) -> fx.Node:
        """Return the mark of a value where it is let through or is not finite."""
        copy = self._copies[value]
        self.cut[copy] = None
        infinite = self._call(aten.logical_not.default, self._call(aten.isfinite.default, copy))
        return self._call(aten.mul.Tensor, self._marks[value], self._call(aten.logical_or.default, through, infinite))

    def _sum(self, node: fx.Node, marks: Sequence[fx.Node]) -> fx.Node:
        """Return the sum of marks, in the shape of an op's result."""
        total = self._call(aten.expand_as.default, marks[0], self._copies[node])
        for mark in marks[1:]:
            total = self._call(aten.add.Tensor, total, mark)
        return total

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self._graph.call_function(target, args, kwargs)


_ELEMENTWISE = (aten_rules.pointwise, aten_rules.like_first)
_SUMS: dict[Any, Any] = {aten.mean.default: aten.sum.default, aten.mean.dim: aten.sum.dim_IntList}
"""Marks stay whole numbers: none becomes zero by division."""
_SIZES = (aten.sym_size, aten.sym_numel, aten.sym_stride)
"""Ops that read no numbers."""


def _shape(node: fx.Node) -> list[str]:
    return [str(size) for size in node.meta["val"].shape]


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _dtype(node: fx.Node) -> torch.dtype:
    found: torch.dtype = node.meta["val"].dtype
    return found


def _changes_device(node: fx.Node) -> bool:
    before = [x.meta["val"] for x in node.all_input_nodes if _is_tensor(x)]
    return any(value.device != node.meta["val"].device for value in before)


def _is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _reached(graph: fx.Graph, start: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """Return the nodes for which `start` holds and all whose numbers depend on theirs."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if packet(node.target) not in _SIZES and (start(node) or any(x in found for x in node.all_input_nodes)):
            found.add(node)
    return found

"""In-place ops as functional ones: what a write changes is every later use of the memory it writes to.

Used by normalise. Fake values that share a storage are views of one memory. After a write, each view of it that is
still used gets its new value: the written one the result of the functional op; what it is a view of, by putting the
result back; other views, by being taken again. A write that eager autograd would not see as one is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from longstraw import compat
from longstraw.arch.constants import is_new
from longstraw.arch.rules import arguments, emit, op_name, packet, tensors
from longstraw.errors import UnsupportedOp, user_line

aten = torch.ops.aten


def make_functional(graph: fx.Graph, *, trained: frozenset[str]) -> None:
    """Replace the in-place ops of a graph.

    Args:
        graph: an ATen graph with grad-mode switches.
        trained: names of the placeholders that need a gradient.
    """
    if any(_is_write(node) for node in graph.nodes):
        for node in list(graph.nodes):
            if _is_write(node) and torch.Tag.inplace_view in getattr(node.target, "tags", ()):
                _take_view(graph, node)
        _Writes(graph, trained).run()


def _take_view(graph: fx.Graph, node: fx.Node) -> None:
    """Replace an op that gives its argument another shape in place, such as `unsqueeze_`, by the view itself."""
    op = getattr(aten, packet(node.target).__name__.rstrip("_"), None)
    overloads = (node.target._overloadname, "int")  # type: ignore[union-attr]
    view = next((getattr(op, name) for name in overloads if op is not None and name in op.overloads()), None)
    before = node.args[0]
    if view is None or not isinstance(before, fx.Node):
        raise _error(node, "it has no functional form")
    with graph.inserting_before(node):
        after = graph.call_function(view, node.args, node.kwargs)
    after.meta = dict(node.meta)
    order = {n: i for i, n in enumerate(graph.nodes)}
    for user in list(before.users):
        if user is not after and order[user] >= order[node]:
            user.replace_input_with(before, after)
    node.replace_all_uses_with(after)
    graph.erase_node(node)


def is_its_operand(node: fx.Node) -> fx.Node | None:
    """Return the operand that an op hands back itself, as a cast that changes nothing does; None for other ops.

    Ops of other namespaces never do: what their fake form returns says nothing.
    """
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, torch.Tensor) or _is_write(node):
        return None
    if node.target is operator.getitem:
        return _element(node)
    if getattr(node.target, "namespace", "") != "aten":
        return None
    same = [x for x in tensors((node.args, node.kwargs)) if _same_place(x.meta["val"], value)]
    if not same:
        return None
    found = _called_again(node)
    return next((x for x in same if x.meta["val"] is found), None)


def _element(node: fx.Node) -> fx.Node | None:
    source, index = node.args
    if not isinstance(source, fx.Node) or not isinstance(index, int):
        return None
    if getattr(source.target, "namespace", "") != "aten":
        return None
    same = [x for x in tensors((source.args, source.kwargs)) if _same_place(x.meta["val"], node.meta["val"])]
    found = _called_again(source)[index] if same else None
    return next((x for x in same if x.meta["val"] is found), None)


def _called_again(node: fx.Node) -> Any:
    """Call an op that returns views on its operands' fake values, as under no_grad."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with torch.no_grad():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _same_place(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two fake values are the same elements of one memory in the same order."""
    return (
        compat.memory(a) == compat.memory(b)
        and a.dtype == b.dtype
        and a.ndim == b.ndim
        and all(
            compat.expression(x) == compat.expression(y)
            for x, y in zip(
                (*a.shape, *a.stride(), a.storage_offset()), (*b.shape, *b.stride(), b.storage_offset()), strict=True
            )
        )
    )


def _is_write(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and schema.is_mutable


def _memory(node: fx.Node) -> int | None:
    """Return the identity of the memory that a node's value (or all of its values) lies in."""
    value = node.meta.get("val")
    found = {
        compat.memory(v) if isinstance(v, torch.Tensor) else None
        for v in (value if isinstance(value, (tuple, list)) else (value,))
    }
    return found.pop() if len(found) == 1 else None


class _Writes:
    """Walks a graph in order; `now` holds what each value of the original graph has become.

    Args:
        graph: changed in place.
        trained: names of the placeholders that need a gradient.
    """

    def __init__(self, graph: fx.Graph, trained: frozenset[str]) -> None:
        self.graph, self.trained = graph, trained
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self.now: dict[fx.Node, fx.Node] = {}
        self.source: dict[fx.Node, fx.Node] = {}  # view -> what it is a view of
        self.original: dict[fx.Node, tuple[Any, Any]] = {}  # view -> arguments it was taken with
        self.views: dict[int, list[fx.Node]] = {}  # memory -> its views, in order
        self.last_use = {node: max((self.order[u] for u in node.users), default=-1) for node in graph.nodes}
        self.learns: set[fx.Node] = set()  # values that a gradient flows through

    def run(self) -> None:
        """Replace every write."""
        grad = True
        for node in list(self.order):
            if node.op == "call_function" and node.target is torch._C._set_grad_enabled:
                grad = bool(node.args[0])
            self._note(node, grad)
            if _is_write(node):
                self._write(node, grad)
            else:
                node.args = map_arg(node.args, self._current)
                node.kwargs = map_arg(node.kwargs, self._current)
        for node in reversed(list(self.order)):
            if _is_write(node):
                self.graph.erase_node(node)

    def _current(self, node: fx.Node) -> fx.Node:
        return self.now.get(node, node)

    def _note(self, node: fx.Node, grad: bool) -> None:
        """Learn what a node is a view of, and whether a gradient flows through it."""
        operands = [x for x in node.all_input_nodes if "val" in x.meta]
        memory = _memory(node)
        source = next((x for x in operands if memory is not None and _memory(x) == memory), None)
        if source is not None and node.op == "call_function":
            self.source[node], self.original[node] = source, (node.args, node.kwargs)
        if memory is not None:
            self.views.setdefault(memory, []).append(node)
        if node.op == "placeholder":
            learns = node.name in self.trained
        elif source is not None and self._is_identical(node, source):
            learns = source in self.learns
        else:
            cut = packet(node.target) is aten.detach or is_new(node)
            learns = grad and not cut and any(x in self.learns for x in operands)
        if learns:
            self.learns.add(node)

    def _is_identical(self, node: fx.Node, source: fx.Node) -> bool:
        return _is_write(node) or is_its_operand(node) is source

    # --- one write ----------------------------------------------------------------------------------------------------

    def _write(self, node: fx.Node, grad: bool) -> None:
        written = node.args[0]
        schema = node.target._schema  # type: ignore[union-attr]
        alias = schema.arguments[0].alias_info
        if alias is None or not alias.is_write or not isinstance(written, fx.Node):
            raise _error(node, "it writes to something else than its first argument")
        self._check_root(node, written)
        if not grad and written in self.learns:
            raise _error(node, "it changes, without autograd seeing it, a value that gradients flow through")
        with self.graph.inserting_before(node):
            new = _functional_form(self.graph, node, self._current)
            new.meta = {**node.meta, "val": written.meta["val"]}
            fresh: dict[fx.Node, fx.Node] = {written: new, node: new}
            if grad and any(x in self.learns for x in node.all_input_nodes):
                self.learns.update((written, node))
            memory = _memory(written)
            live = [
                view
                for view in self.views.get(memory, ())  # type: ignore[arg-type]
                if view is not node and view is not written and self.last_use[view] > self.order[node]
            ]
            chain = self._chain(written)
            for view in live:
                self._check_history(node, view, written, chain)
                self._updated(node, view, chain, fresh)
            if written in self.learns:
                self.learns.update(live)
        self.now.update(fresh)

    def _chain(self, written: fx.Node) -> dict[fx.Node, fx.Node]:
        """Return for everything that the written value is a view of, the next view on the way to it."""
        chain: dict[fx.Node, fx.Node] = {}
        at = written
        while at in self.source:
            base = self._tensor_source(at)
            chain[base] = at
            at = base
        return chain

    def _tensor_source(self, view: fx.Node) -> fx.Node:
        """Return the tensor that a view was taken of; pieces of a split are views of what was split."""
        source = self.source[view]
        return source if isinstance(source.meta["val"], torch.Tensor) else self.source[source]

    def _check_root(self, node: fx.Node, written: fx.Node) -> None:
        at = written
        while at in self.source:
            at = self.source[at]
        if at.op == "placeholder":
            raise _error(node, "it changes one of the step's inputs")
        if at.op == "get_attr":
            raise _error(node, "it changes a constant")

    def _check_history(self, node: fx.Node, view: fx.Node, written: fx.Node, chain: Mapping[fx.Node, fx.Node]) -> None:
        """Refuse a write that reaches a value across `detach`: eager changes its numbers and keeps its gradient."""
        if view not in self.learns and written not in self.learns:
            return
        path = [written, *chain]
        at = view
        crossed = []
        while at not in path:
            crossed.append(at)
            at = self._tensor_source(at)
        crossed += path[: path.index(at)]
        if any(packet(x.target) is aten.detach for x in crossed):
            raise _error(node, "it changes, through detach, a value that gradients flow through")

    def _updated(
        self, node: fx.Node, view: fx.Node, chain: Mapping[fx.Node, fx.Node], fresh: dict[fx.Node, fx.Node]
    ) -> fx.Node:
        """Return a view's value after the write."""
        if view in fresh:
            return fresh[view]
        if view in chain:
            below = chain[view]
            new = self._put_back(node, view, below, self._updated(node, below, chain, fresh))
        elif _is_write(view):
            new = self._updated(node, self.source[view], chain, fresh)
        else:
            self._updated(node, self.source[view], chain, fresh)
            args, kwargs = map_arg(self.original[view], lambda x: fresh.get(x, self._current(x)))
            new = self.graph.call_function(view.target, args, kwargs)  # type: ignore[arg-type]
        new.meta = {**node.meta, "val": view.meta["val"]}
        fresh[view] = new
        return new

    def _put_back(self, node: fx.Node, base: fx.Node, view: fx.Node, value: fx.Node) -> fx.Node:
        """Return `base` with the part that `view` shows replaced by `value`."""
        if _same_place(base.meta["val"], view.meta["val"]):
            return value
        call, before = self.graph.call_function, self._current(base)
        source = self.source[view]
        if source is not base:
            return self._put_piece_back(node, source, view, value, before)
        args, kwargs = map_arg(self.original[view], self._current)
        target, name = view.target, packet(view.target)
        if name is aten.narrow:
            _, dim, start, length = args
            stop = start + length if isinstance(start, int) and isinstance(length, int) else self._sum(start, length)
            return call(aten.slice_scatter.default, (before, value, dim, start, stop, 1))
        if name in _SCATTERS:
            return call(_SCATTERS[name], (before, value, *args[1:]), kwargs)
        if name in _SAME_ORDER:
            return call(aten.view_as.default, (value, before))
        order = _permutation(target, base.meta["val"].ndim, self.original[view]) if name in _PERMUTES else None
        if order is None:
            raise _error(node, f"it writes through {op_name(view)}")
        inverse = [order.index(d) for d in range(len(order))]
        return call(aten.permute.default, (value, inverse))

    def _sum(self, a: Any, b: Any) -> fx.Node:
        total = self.graph.call_function(operator.add, (a, b))
        one, other = map_arg((a, b), lambda n: n.meta["val"])
        total.meta = {"val": one + other}
        return total

    def _put_piece_back(
        self, node: fx.Node, pieces: fx.Node, view: fx.Node, value: fx.Node, before: fx.Node
    ) -> fx.Node:
        index = view.args[1]
        dim = arguments(pieces).get("dim", 0) if packet(pieces.target) in (*_SPLITS, aten.unbind) else None
        if dim is None:
            raise _error(node, f"it writes through {op_name(pieces)}")
        if packet(pieces.target) is aten.unbind:
            return self.graph.call_function(aten.select_scatter.default, (before, value, dim, index))
        taken = self._current(pieces)
        listed = []
        for i, part in enumerate(pieces.meta["val"]):
            one = value if i == index else self.graph.call_function(operator.getitem, (taken, i))
            one.meta = {**node.meta, "val": part}
            listed.append(one)
        return self.graph.call_function(aten.cat.default, (listed, dim))


_SCATTERS = {
    aten.slice: aten.slice_scatter.default,
    aten.select: aten.select_scatter.default,
    aten.diagonal: aten.diagonal_scatter.default,
}
_SAME_ORDER = (
    aten.view,
    aten._unsafe_view,
    aten.reshape,
    aten.view_as,
    aten.reshape_as,
    aten.flatten,
    aten.unflatten,
    aten.ravel,
    aten.unsqueeze,
    aten.squeeze,
    aten.atleast_1d,
    aten.atleast_2d,
    aten.atleast_3d,
)
_PERMUTES = (
    aten.transpose,
    aten.swapaxes,
    aten.swapdims,
    aten.permute,
    aten.movedim,
    aten.moveaxis,
    aten.t,
    aten.mT,
    aten.numpy_T,
    aten.adjoint,
)
_SPLITS = (aten.chunk, aten.split, aten.split_with_sizes, aten.tensor_split)


def _permutation(op: Any, rank: int, call: tuple[Any, Any]) -> list[int] | None:
    """Return which dim of its operand each dim of a permuting op's result is."""
    args, kwargs = call
    sizes = list(range(2, 2 + rank))
    result = op(torch.empty(sizes, device="meta"), *args[1:], **kwargs)
    return [sizes.index(size) for size in result.shape]


def _functional_form(graph: fx.Graph, node: fx.Node, current: Callable[[fx.Node], fx.Node]) -> fx.Node:
    """Insert the functional form of an in-place op, in the dtype and shape of what it writes to."""
    name = node.target._schema.name.split("::")[1]  # type: ignore[union-attr]
    args, kwargs = map_arg((node.args, node.kwargs), current)
    written = node.args[0].meta["val"]  # type: ignore[union-attr]
    if name == "zero_":
        return graph.call_function(aten.zeros_like.default, (args[0],))
    if name == "copy_" or (name == "fill_" and isinstance(args[1], fx.Node)):
        value = _cast(graph, node, args[1], written.dtype)  # type: ignore[arg-type]
        return graph.call_function(aten.expand_as.default, (value, args[0]))
    if name == "fill_":
        return graph.call_function(aten.full_like.default, (args[0], args[1]))
    op = getattr(aten, name.rstrip("_"), None)
    overload = getattr(op, node.target._overloadname, None) if op is not None else None  # type: ignore[union-attr]
    if overload is None:
        raise _error(node, "it has no functional form")
    new = graph.call_function(overload, args, kwargs)
    fakes = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    new.meta = {**node.meta, "val": overload(*fakes[0], **fakes[1])}
    return _cast(graph, node, new, written.dtype)


def _cast(graph: fx.Graph, node: fx.Node, value: fx.Node, dtype: torch.dtype) -> fx.Node:
    if value.meta["val"].dtype == dtype:
        return value
    return emit(graph, node, aten.to.dtype, value, dtype)


def _error(node: fx.Node, why: str) -> UnsupportedOp:
    return UnsupportedOp(
        f"The in-place op {op_name(node)} can't be made functional: {why}.",
        where=user_line(node.meta.get("stack_trace")),
        remedy="Write the out-of-place form, e.g. x = torch.where(...) or y = x + 1.",
    )

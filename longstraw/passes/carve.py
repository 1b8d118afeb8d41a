"""Copies a part of the step into a graph that runs on any rows and any span of tokens.

Used by partition. Sizes that were numbers of rows or tokens of the step become the inputs `rows` and `tokens`; slices
that only narrow the window of tokens vanish, for the caller runs just the tokens of that window.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.node import map_arg

from longstraw import ops
from longstraw.arch.rules import arguments, op_name, packet
from longstraw.compat import expression
from longstraw.errors import UnsupportedOp, user_line
from longstraw.layout import ROWS, Counts, Dim, Factor, Layout, Rows, Shuffled, Tokens, bytes_per_token, find_dim, has
from longstraw.stages import Carved, Located, SegmentInputs, TokenInput

aten = torch.ops.aten
_RESHAPES = (aten.view, aten.reshape, aten._unsafe_view, aten.unflatten, aten.view_as, aten.reshape_as, aten.squeeze)
_EXPANDS = (aten.expand, aten.expand_as)
_CREATE = (aten.zeros, aten.ones, aten.full, aten.empty)
_CREATE_LIKE = (aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty)


def carve(step: Located, *, outputs: Sequence[fx.Node], stops: Sequence[fx.Node] = ()) -> Carved:
    """Return the graph that computes `outputs` on a span of tokens.

    Args:
        step: the step with layouts.
        outputs: region or tail nodes.
        stops: region nodes that the graph takes as inputs, in this order, after all others.
    """
    return _Carver(step, stops).run(outputs)


def dims(node: fx.Node) -> tuple[Dim, ...]:
    """Return what the dims of a carved graph's node run over, of all its outputs."""
    layout = node.meta.get("layout") or ()
    several = isinstance(node.meta.get("val"), (tuple, list))
    return tuple(dim for one in layout for dim in one) if several else tuple(layout)


def runs_over_tokens(node: fx.Node) -> bool:
    """Return whether a carved graph's node has values for every token."""
    return any(has(dim, Tokens) for dim in dims(node))


def computed_bytes(node: fx.Node) -> int:
    """Return how many bytes per row and token a carved graph's op computes, as one tensor; 0 for other nodes."""
    value, layout = node.meta.get("val"), node.meta.get("layout")
    if node.op != "call_function" or not isinstance(value, torch.Tensor) or not layout:
        return 0
    return bytes_per_token(layout, value)


class _Carver:
    def __init__(self, step: Located, stops: Sequence[fx.Node]) -> None:
        self.step, self.stops = step, tuple(stops)
        self.graph = fx.Graph()
        self.root = torch.nn.Module()
        self.env: dict[fx.Node, fx.Node] = {}
        self.rows = self._placeholder("rows", (), None)
        self.tokens = self._placeholder("tokens", (), None)
        self.parameters: dict[fx.Node, fx.Node] = {}
        self.values: dict[fx.Node, fx.Node] = {}
        self.masks: dict[fx.Node, fx.Node] = {}
        self.token_inputs: dict[tuple[fx.Node, Any], tuple[TokenInput, fx.Node]] = {}

    def run(self, outputs: Sequence[fx.Node]) -> Carved:
        needed = self._needed(outputs)
        stops = {
            node: self._placeholder(f"hidden_{i}", self.step.layouts[node], node) for i, node in enumerate(self.stops)
        }
        self.env.update(stops)
        for node in self.step.module.graph.nodes:
            if node in needed and node not in self.env:
                self.env[node] = self._copy(node)
        self.graph.output(tuple(self.env[node] for node in outputs))
        inputs = SegmentInputs(
            tuple(self.parameters),
            tuple(self.values),
            tuple(t for t, _ in self.token_inputs.values()),
            tuple(self.masks),
        )
        order = [
            self.rows,
            self.tokens,
            *self.parameters.values(),
            *self.values.values(),
            *(node for _, node in self.token_inputs.values()),
            *self.masks.values(),
            *stops.values(),
        ]
        return Carved(_ordered_module(self.root, self.graph, order), inputs)

    def _needed(self, outputs: Sequence[fx.Node]) -> set[fx.Node]:
        needed: set[fx.Node] = set()
        stack = list(outputs)
        while stack:
            node = stack.pop()
            if node in needed or node in self.stops or not self._inside(node):
                continue
            needed.add(node)
            stack.extend(x for x in node.all_input_nodes)
        return needed

    def _inside(self, node: fx.Node) -> bool:
        """Return whether the segment computes this node itself."""
        kind = self.step.kinds.get(node)
        return node.op != "placeholder" and (kind in ("region", "tail", "invariant") or node in self.step.local)

    def _placeholder(self, name: str, layout: Layout, node: fx.Node | None) -> fx.Node:
        new = self.graph.placeholder(name)
        new.meta = {"layout": layout}
        if node is not None:
            new.meta.update({"val": node.meta["val"], "stack_trace": node.meta.get("stack_trace"), "origin": node})
        return new

    # --- operands ---------------------------------------------------------------------------------------------------

    def _operand(self, user: fx.Node, node: fx.Node) -> fx.Node:
        layout = self.step.demands.get((user, node))
        by_token = layout is not None and any(has(dim, Tokens) or has(dim, Rows) for dim in layout)
        if node in self.env and not (by_token and node in self.step.local):
            return self.env[node]
        kind = self.step.kinds[node]
        if node.op == "get_attr" and "val" not in node.meta:  # a score function
            self.env[node] = self._plain_copy(node)
            return self.env[node]
        if user.target in (ops.attention, ops.select) and node in user.args[3]:  # type: ignore[operator]
            return self._known(self.masks, node, "mask")
        if kind == "block":
            raise _cannot(user, "it reads a mask or bias over pairs of tokens")
        if node.op == "placeholder" and kind == "invariant":
            return self._known(self.parameters, node, "parameter")
        if layout is not None and by_token:
            return self._token_input(node, layout)
        return self._known(self.values, node, "value")

    def _known(self, table: dict[fx.Node, fx.Node], node: fx.Node, prefix: str) -> fx.Node:
        if node not in table:
            table[node] = self._placeholder(f"{prefix}_{len(table)}", (), node)
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                table[node].meta["layout"] = self._plain(node)
        return table[node]

    def _plain(self, node: fx.Node) -> Layout:
        return tuple(() if size == (1, 1) else (size,) for size in self.step.sizes.shape(node.meta["val"]))

    def _token_input(self, node: fx.Node, layout: Layout) -> fx.Node:
        key = (node, self._signature(layout))
        if key not in self.token_inputs:
            name = f"token_input_{len(self.token_inputs)}"
            token_input = TokenInput(node, layout, _repeated_tokens(node, layout))
            self.token_inputs[key] = (token_input, self._placeholder(name, layout, node))
        return self.token_inputs[key][1]

    def _signature(self, layout: Layout) -> Any:
        """Return a hashable spelling of a layout in which equal windows are equal."""
        probe = self.step.sizes.probe

        def spell(factor: Factor) -> Any:
            if isinstance(factor, Tokens):
                return ("tokens", probe(factor.start), probe(factor.stop))
            return factor

        return tuple(tuple(spell(factor) for factor in dim) for dim in layout)

    # --- sizes ------------------------------------------------------------------------------------------------------

    def _size(self, user: fx.Node, dim: Dim) -> Any:
        """Return a dim's size as a number or a node of the segment."""
        plain, dynamic = 1, []
        for factor in dim:
            match factor:
                case Rows():
                    dynamic.append(self.rows)
                case Tokens():
                    dynamic.append(self.tokens)
                case Shuffled(_, of):
                    inner = self._size(user, of)
                    if isinstance(inner, int):
                        plain *= inner
                    else:
                        dynamic.append(inner)
                case Counts(_, size):
                    plain *= size[0]
                case (a, b) if a == b:
                    plain *= a
                case _:
                    dynamic.append(self._other_size(user, factor))
        if not dynamic:
            return plain
        product = dynamic[0]
        others: list[fx.Node | int] = [*dynamic[1:], *([plain] if plain != 1 else [])]
        for other in others:
            product = self.graph.call_function(operator.mul, (product, other))
        return product

    def _other_size(self, user: fx.Node, size: tuple[int, int]) -> fx.Node:
        for node in self.step.module.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt) and self.step.sizes.probe(value) == size:
                return self._known(self.values, node, "value")
        raise _cannot(user, "a size of its result is neither rows, tokens, nor a number known before")

    def _sizes(self, node: fx.Node, layout: Layout) -> list[Any]:
        return [self._size(node, dim) for dim in layout]

    # --- copying ----------------------------------------------------------------------------------------------------

    def _copy(self, node: fx.Node) -> fx.Node:
        layout = self.step.layouts.get(node)
        if node in self.step.local:
            layout = self.step.sizes.locate_shape(self.step.sizes.shape(node.meta["val"]))
        new = self._resized(node, layout) if layout is not None and self._layout_is_sized(node, layout) else None
        if new is None:
            new = self._plain_copy(node)
        if new.op != "placeholder" and "origin" not in new.meta:
            new.meta = {k: node.meta[k] for k in ("val", "stack_trace", "autocast") if k in node.meta}
            new.meta.update({"layout": layout if layout is not None else self._plain_or_none(node), "origin": node})
        return new

    def _plain_or_none(self, node: fx.Node) -> Layout | None:
        return self._plain(node) if isinstance(node.meta.get("val"), torch.Tensor) else None

    def _layout_is_sized(self, node: fx.Node, layout: Any) -> bool:
        return (
            node.op == "call_function"
            and bool(layout)
            and isinstance(node.meta.get("val"), torch.Tensor)
            and any(has(dim, Tokens) or has(dim, Rows) for dim in layout)
        )

    def _plain_copy(self, node: fx.Node) -> fx.Node:
        if node.op == "get_attr":
            target = str(node.target).replace(".", "_")
            setattr(self.root, target, getattr(self.step.module, str(node.target)))
            return self.graph.get_attr(target)
        args = map_arg(node.args, lambda x: self._operand(node, x))
        kwargs = map_arg(node.kwargs, lambda x: self._operand(node, x))
        return self.graph.create_node("call_function", node.target, args, kwargs, name=node.name)

    def _resized(self, node: fx.Node, layout: Layout) -> fx.Node | None:
        """Return the copy of an op that is told sizes, with the span's sizes; None for other ops."""
        name = packet(node.target)
        call = self.graph.call_function
        if name in _RESHAPES:
            return call(aten.reshape.default, (self._operand(node, node.args[0]), self._sizes(node, layout)))  # type: ignore[arg-type]
        if name in _EXPANDS:
            return call(aten.expand.default, (self._operand(node, node.args[0]), self._sizes(node, layout)))  # type: ignore[arg-type]
        if name in _CREATE or name in _CREATE_LIKE:
            at = 0 if name in _CREATE else 1
            args = [*node.args]
            args[at] = self._sizes(node, layout)
            args = map_arg(args, lambda x: x if x.graph is self.graph else self._operand(node, x))
            return call(node.target, tuple(args), dict(node.kwargs))  # type: ignore[arg-type]
        if name is aten.arange:
            numbers = [x for x in node.args if not isinstance(x, fx.Node)]
            if any(numbers[:-1]) or len(node.args) > 2:
                raise _cannot(node, "it doesn't count from 0 in steps of 1")
            return call(aten.arange.default, (self._size(node, layout[0]),), dict(node.kwargs))
        if name in (aten.slice, aten.narrow):
            source = node.args[0]
            assert isinstance(source, fx.Node)
            before = self.step.layouts.get(source)
            d = arguments(node)["dim"] % len(layout)
            if before is not None and has(before[d], Tokens):
                return self._operand(node, source)
        if name in (aten.pad, aten.constant_pad_nd) and node not in self.step.scans:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            before = self.step.layouts.get(source)
            if before is not None and any(
                has(b, Tokens) and b != after for b, after in zip(before, layout, strict=True)
            ):
                return self._operand(node, source)  # what is before the first token is known to the op that reads it
        if name is aten.repeat:
            return self._repeat(node, layout)
        return None

    def _repeat(self, node: fx.Node, layout: Layout) -> fx.Node:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        before = self.step.layouts.get(source) or self.step.demands.get((node, source)) or self._plain(source)
        before = ((),) * (len(layout) - len(before)) + before
        counts = []
        for dim, old, count in zip(layout, before, node.args[1], strict=True):  # type: ignore[arg-type]
            counts.append(self._size(node, dim) if isinstance(count, fx.Node) and old == () else count)
        if any(isinstance(c, fx.Node) and c.graph is not self.graph for c in counts):
            raise _cannot(node, "it repeats the token or row dim")
        return self.graph.call_function(aten.repeat.default, (self._operand(node, source), counts))


def _repeated_tokens(node: fx.Node, layout: Layout) -> sympy.Expr:
    """Return how many leading tokens of a value are an `expand` of one row."""
    row_dim, token_dim = find_dim(layout, Rows), find_dim(layout, Tokens)
    if row_dim is None or token_dim is None or layout[row_dim] != (ROWS,) or not _is_tokens(layout[token_dim]):
        return sympy.Integer(0)
    return _leading_of_one_row(node, row_dim, token_dim)


def _is_tokens(dim: Dim) -> bool:
    return len(dim) == 1 and isinstance(dim[0], Tokens)


def _leading_of_one_row(node: fx.Node, row_dim: int, token_dim: int) -> sympy.Expr:
    name = packet(node.target)
    if name is aten.to:
        return _leading_of_one_row(arguments(node)["self"], row_dim, token_dim)
    if name is aten.expand and _had_one_row(node, row_dim):
        return _size_along(node, token_dim)
    if name is not aten.cat:
        return sympy.Integer(0)
    a = arguments(node)
    parts, dim = a["tensors"], a["dim"] % node.meta["val"].ndim
    found = [_leading_of_one_row(part, row_dim, token_dim) for part in parts]
    if dim == token_dim:
        whole = [one == _size_along(part, token_dim) for one, part in zip(found, parts, strict=True)]
        return sum(found[: [*whole, False].index(False) + 1], sympy.Integer(0))
    joins_rows = dim == row_dim  # then rows come from several parts, however equal their values are
    return found[0] if not joins_rows and len(set(found)) == 1 else sympy.Integer(0)


def _had_one_row(expand: fx.Node, row_dim: int) -> bool:
    """Return whether all rows of an `expand` are one row of its operand, which may have no dim for them."""
    source = arguments(expand)["self"]
    at = row_dim - (expand.meta["val"].ndim - source.meta["val"].ndim)
    return at < 0 or bool(_size_along(source, at) == 1)


def _size_along(node: fx.Node, dim: int) -> sympy.Expr:
    return expression(node.meta["val"].shape[dim])


def _ordered_module(root: torch.nn.Module, graph: fx.Graph, placeholders: Sequence[fx.Node]) -> fx.GraphModule:
    """Return a module of the graph with its placeholders first, in the given order."""
    ordered = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in placeholders:
        env[node] = ordered.node_copy(node)
    for node in graph.nodes:
        if node not in env and node.op != "output":
            env[node] = ordered.node_copy(node, env.__getitem__)
    last = next(iter(reversed(graph.nodes)))
    ordered.output(map_arg(last.args[0], env.__getitem__))
    return fx.GraphModule(root, ordered)


def _cannot(node: fx.Node, why: str) -> UnsupportedOp:
    return UnsupportedOp(
        f"{op_name(node)} can't be run on a span of tokens: {why}.",
        where=user_line(node.meta.get("stack_trace")),
        remedy="Write it without explicit sizes (e.g. `-1`, `expand_as`, `zeros_like`), or add a rule.",
    )

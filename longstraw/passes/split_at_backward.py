"""split_at_backward: a step that calls backward itself, as forward pieces and what stands between them.

In: a Dynamo graph with `torch.autograd.grad` nodes. Out: an outer graph that calls one module for the forward of each
backward, and keeps everything that depends on gradients (accumulation into `.grad`, norms, updates) as it was. Metrics
that are computed after a backward from values before it move into that backward's piece.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from longstraw import compat
from longstraw.errors import UnsupportedOp, user_line


def split_at_backward(gm: fx.GraphModule, *, compile_piece: Callable[[fx.GraphModule], Callable[..., Any]]) -> Any:
    """Return a callable with the graph's inputs and outputs, its forward pieces compiled.

    Args:
        gm: Dynamo's graph.
        compile_piece: compiles a graph without backward.
    """
    if not any(_is_backward(node) for node in gm.graph.nodes):
        return compile_piece(gm)
    pieces = _assign(gm.graph)
    _check_order(gm.graph, pieces)
    outer = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    root = torch.nn.Module()
    for name, child in (*gm.named_children(), *gm.named_buffers(recurse=False), *gm.named_parameters(recurse=False)):
        setattr(root, name, child)
    placed = 0
    for node in gm.graph.nodes:
        if node in pieces and REST not in pieces[node]:
            continue
        while placed <= _needed(node, pieces):
            _place(gm, placed, pieces, outer, env, root, compile_piece)
            placed += 1
        env[node] = outer.node_copy(node, env.__getitem__)
        if _is_backward(node):
            env[node].target = _gradients
            env[node].kwargs = {**env[node].kwargs, "where": user_line(node.meta.get("stack_trace"))}
    return fx.GraphModule(root, outer)


REST = -1


def _gradients(outputs: Any, inputs: Any, *args: Any, where: str, **kwargs: Any) -> Any:
    """`torch.autograd.grad`, which calls hooks on gradients, and none of those that wait for `.grad`."""
    for leaf in inputs if isinstance(inputs, (list, tuple)) else [inputs]:
        if compat.waits_for_grad(leaf):
            raise UnsupportedOp(
                f"A parameter {tuple(leaf.shape)} has a hook that is called when its .grad is complete "
                "(register_post_accumulate_grad_hook), and the step calls backward() itself: it would not be called.",
                where=where,
                remedy="Return the loss and call backward() outside of the compiled step, or remove the hook.",
            )
    return torch.autograd.grad(outputs, inputs, *args, **kwargs)


def _needed(node: fx.Node, pieces: Mapping[fx.Node, set[int]]) -> int:
    """Return the last piece that must have run before a node of the outer graph."""
    return max((p for x in node.all_input_nodes for p in pieces.get(x, ())), default=REST)


def _check_order(graph: fx.Graph, pieces: Mapping[fx.Node, set[int]]) -> None:
    """Refuse a write to an input that would run before or after a read of it that it runs after or before in eager."""
    times: dict[fx.Node, tuple[int, int]] = {}
    placed = 0
    for now, node in enumerate(graph.nodes):
        if node in pieces and REST not in pieces[node]:
            continue
        while placed <= _needed(node, pieces):
            members = [n for n in graph.nodes if placed in pieces.get(n, ())]
            times.update((n, (now, i)) for i, n in enumerate(members))
            placed += 1
        times[node] = (now, len(graph.nodes))
    accesses: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if node in times and _is_computed(node):
            for memory in _read(node):
                accesses.setdefault(memory, []).append(node)
    for memory, nodes in accesses.items():
        for first, second in itertools.combinations(nodes, 2):
            one, other = (_writes(x) and _written(x) == memory for x in (first, second))
            if (one or other) and times[first] > times[second]:
                write = first if one else second
                raise UnsupportedOp(
                    f"{_name(write)} changes an input of the step that is also read before a backward call, and the "
                    "order of the two would not be kept.",
                    where=user_line(write.meta.get("stack_trace")),
                    remedy="Change it after the last backward call, or change a copy of it.",
                )


def _read(node: fx.Node) -> set[int]:
    """Return the memories of the tensors that a node reads."""
    values = (x.meta.get("example_value") for x in node.all_input_nodes)
    return {compat.memory(value) for value in values if isinstance(value, torch.Tensor)}


def _written(node: fx.Node) -> int | None:
    """Return the memory that an in-place op changes."""
    value = node.all_input_nodes[0].meta.get("example_value") if node.all_input_nodes else None
    return compat.memory(value) if isinstance(value, torch.Tensor) else None


def _is_backward(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is torch.autograd.grad


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", ""))


def _is_mode(node: fx.Node) -> bool:
    """Return whether a node switches grad mode or autocast: it belongs wherever the nodes between the switches do."""
    return node.op == "call_function" and _name(node) in ("_set_grad_enabled", *_ENTERS, *_EXITS)


_ENTERS = ("_enter_autocast", "_enter_inference_mode")
_EXITS = ("_exit_autocast", "_exit_inference_mode")


def _writes(node: fx.Node) -> bool:
    """Return whether a Dynamo node changes a tensor."""
    name = _name(node)
    in_place = name.endswith("_") and not name.endswith("__")
    return node.op in ("call_method", "call_function") and (in_place or name == "setitem")


def _is_computed(node: fx.Node) -> bool:
    if node.op in ("placeholder", "output", "get_attr", "root") or _is_mode(node):
        return False
    # A Python float that changes from call to call, and arithmetic with it, comes before all pieces, like an input.
    is_number = isinstance(node.meta.get("example_value"), torch.SymFloat)
    return not is_number or any(map(_is_computed, node.all_input_nodes))


def _assign(graph: fx.Graph) -> dict[fx.Node, set[int]]:
    """Return for each computed node the piece that it belongs to, or REST; switches may belong to several."""
    wanted = _ancestors(node for node in graph.nodes if _is_backward(node))
    tainted = _after_gradients(graph, {m for node in wanted if _is_computed(node) for m in _read(node)})
    total = sum(_is_backward(node) for node in graph.nodes)
    pieces: dict[fx.Node, set[int]] = {}
    interval = 0
    for node in graph.nodes:
        if not _is_computed(node):
            continue
        inputs = [p for x in node.all_input_nodes for p in pieces.get(x, ())]
        if _is_backward(node):
            interval += 1
        rest = node in tainted or REST in inputs or (interval == total and not inputs)
        # What a coming loss needs is computed with it; anything else stays with the values that it reads.
        pieces[node] = {REST} if rest else {interval if node in wanted else max(inputs, default=interval)}
    _assign_switches(graph, pieces)
    return pieces


def _ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def _after_gradients(graph: fx.Graph, before_losses: set[int]) -> set[fx.Node]:
    """Return the backward nodes, what depends on them, and what is written with them or outside the graph.

    What is written to an input is not among them if losses read it, too, and no gradient is needed for it.

    Args:
        graph: Dynamo's.
        before_losses: memories that losses are computed from.
    """
    tainted: set[fx.Node] = set()
    before = -1
    while len(tainted) != before:
        before = len(tainted)
        for node in graph.nodes:
            if not _is_computed(node):
                continue
            inputs = node.all_input_nodes
            outside = bool(inputs) and not _is_computed(inputs[0]) and _written(node) not in before_losses
            if _writes(node) and inputs and (outside or any(x in tainted for x in inputs)):
                tainted.update(x for x in (node, inputs[0]) if _is_computed(x))
            elif _is_backward(node) or any(x in tainted for x in inputs):
                tainted.add(node)
    return tainted


def _assign_switches(graph: fx.Graph, pieces: dict[fx.Node, set[int]]) -> None:
    opened: list[tuple[fx.Node, set[int]]] = []
    for node in graph.nodes:
        if not _is_mode(node):
            for _, inside in opened:
                inside.update(pieces.get(node, ()))
            continue
        opens = _name(node) in _ENTERS or (_name(node) not in _EXITS and (node.args == (False,) or not opened))
        if opens:
            opened.append((node, set()))
        else:
            first, inside = opened.pop()
            pieces[first] = pieces[node] = inside
    for node, inside in opened:
        pieces[node] = inside


def _place(
    gm: fx.GraphModule,
    number: int,
    pieces: dict[fx.Node, set[int]],
    outer: fx.Graph,
    env: dict[fx.Node, fx.Node],
    root: torch.nn.Module,
    compile_piece: Callable[[fx.GraphModule], Callable[..., Any]],
) -> None:
    members = [node for node in gm.graph.nodes if number in pieces.get(node, ())]
    if not members:
        return
    known = set(members)
    given = [n for n in gm.graph.nodes if n not in known and any(u in known for u in n.users)]
    inputs = [n for n in given if n.op != "get_attr"]
    outputs = [n for n in members if not _is_mode(n) and any(u not in known for u in n.users)]
    graph = fx.Graph()
    inner: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        inner[node] = graph.placeholder(node.name)
        inner[node].meta = dict(node.meta)
    for node in gm.graph.nodes:
        if node in known or (node.op == "get_attr" and node in given):
            inner[node] = graph.node_copy(node, inner.__getitem__)
    graph.output(tuple(inner[node] for node in outputs))
    piece = compile_piece(fx.GraphModule(gm, graph))
    name = f"forward_{number}"
    setattr(root, name, _Module(piece))
    with_inputs = [env[n] for n in inputs]
    call = outer.call_module(name, tuple(with_inputs))
    for i, node in enumerate(outputs):
        env[node] = outer.call_function(_pick, (call, i))


def _pick(values: Any, index: int) -> Any:
    return values[index]


class _Module(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)

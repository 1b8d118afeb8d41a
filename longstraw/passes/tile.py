"""Tiles the widest token-wise parts of a segment graph (feed-forward layers, experts): they never hold a whole span.

Used by lower. A part is a set of connected wide values together with the narrow values that they end in; it becomes one
`longstraw.ops.tiled` call, which runs it on tiles of tokens and recomputes it in backward where a span would not fit.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import fx

from longstraw import ops
from longstraw.layout import Tokens, has, is_dispatched
from longstraw.passes.carve import computed_bytes, dims, runs_over_tokens

aten = torch.ops.aten
_WIDE = 2
"""A value is wide when it has more than this many times the bytes per token of the hidden states."""


def tile_wide_parts(module: fx.GraphModule, hidden_bytes: int) -> fx.GraphModule:
    """Return the graph with every wide token-wise part as one tiled call.

    Args:
        module: a segment graph whose nodes carry layouts.
        hidden_bytes: bytes per token of the hidden states.
    """
    graph = module.graph
    for number, part in enumerate(list(_parts(graph, _WIDE * hidden_bytes))):
        _replace(module, part, number)
    graph.lint()
    module.recompile()
    return module


def _parts(graph: fx.Graph, limit: int) -> Iterator[list[fx.Node]]:
    """Yield sets of nodes, in graph order, that can run on tiles: wide values, and the narrow ones that read them."""
    wide = {node for node in graph.nodes if computed_bytes(node) > limit}
    counted, taken = _counted(graph), set[fx.Node]()
    done: set[fx.Node] = set()
    for first in graph.nodes:
        if first not in wide or first in done:
            continue
        part: set[fx.Node] = set()
        stack = [first]
        while stack:
            node = stack.pop()
            if node in part:
                continue
            part.add(node)
            joined = node in wide or _is_dispatched(node)
            if joined:
                stack += [x for x in node.all_input_nodes if x in wide or _is_dispatched(x)]
            if joined or _is_merged(node):
                stack += [x for x in node.users if x.op == "call_function"]
        done |= part
        absorbed = _absorb(part, counted)
        if absorbed is None or _exits(absorbed) is None:
            continue
        own = {node for node in absorbed if node.target is not operator.mul and node not in counted}
        if own.isdisjoint(taken):
            taken |= own
            yield [node for node in graph.nodes if node in absorbed]


def _is_dispatched(node: fx.Node) -> bool:
    """Return whether a value is in the order of experts, or counts entries in that order."""
    return node.op == "call_function" and is_dispatched(dims(node))


def _is_merged(node: fx.Node) -> bool:
    """Return whether a value has rows and tokens in one dim: it can't be cut by tokens."""
    return node.op == "call_function" and any(has(dim, Tokens) and len(dim) > 1 for dim in dims(node))


def _absorb(part: set[fx.Node], counted: set[fx.Node]) -> set[fx.Node] | None:
    """Return a part with what it reads that can't be cut by tokens; None when that is more than token-wise ops."""
    part = set(part)
    stack = list(part)
    while stack:
        for x in stack.pop().all_input_nodes:
            several = isinstance(x.meta.get("val"), (tuple, list))
            inside = x.target is operator.mul or several or _is_merged(x) or x in counted
            if inside and x not in part and x.op == "call_function":
                part.add(x)
                stack.append(x)
    inputs = {x for node in part for x in node.all_input_nodes if x not in part}
    whole = any(runs_over_tokens(x) and _token_dim(x) is None for x in inputs)
    mixes = any(node.target in (ops.attend, ops.choose) or node.meta.get("autocast") for node in part)
    return None if whole or mixes else part


def _counted(graph: fx.Graph) -> set[fx.Node]:
    """Return what is made from sizes alone, such as positions among the tokens that are run: made anew for a tile."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        read = [x for x in node.all_input_nodes if isinstance(x.meta.get("val"), torch.Tensor)]
        if node.op == "call_function" and runs_over_tokens(node) and all(x in found for x in read):
            found.add(node)
    return found


def _exits(part: set[fx.Node]) -> fx.Node | None:
    """Return the one value that leaves a part, or None when there are several or it can't be joined along tokens."""
    leaving = [node for node in part if any(user not in part for user in node.users)]
    if len(leaving) != 1 or not isinstance(leaving[0].meta.get("val"), torch.Tensor):
        return None
    return leaving[0] if _token_dim(leaving[0]) is not None else None


def _token_dim(node: fx.Node) -> int | None:
    """Return the dim that runs over nothing but tokens, or None."""
    for i, dim in enumerate(node.meta.get("layout") or ()):
        if len(dim) == 1 and isinstance(dim[0], Tokens):
            return i
    return None


def _replace(module: fx.GraphModule, part: list[fx.Node], number: int) -> None:
    graph, members = module.graph, set(part)
    leaving = _exits(members)
    assert leaving is not None
    counts = {n.name: n for n in graph.nodes if n.op == "placeholder" and n.name in ("rows", "tokens")}
    inner = fx.Graph()
    env = {counts[name]: inner.placeholder(name) for name in ("rows", "tokens")}
    inputs: list[fx.Node] = []
    for node in part:
        for x in node.all_input_nodes:
            if x not in members and x not in env:
                env[x] = inner.placeholder(x.name)
                inputs.append(x)
    for node in part:
        env[node] = inner.node_copy(node, env.__getitem__)
    inner.output(env[leaving])
    name = f"wide_{number}"
    module.add_submodule(name, fx.GraphModule(module, inner))
    with graph.inserting_after(leaving):
        call = graph.call_function(ops.tiled, ())
    with graph.inserting_before(call):
        function = graph.get_attr(name)
    token_dims = tuple(_token_dim(x) for x in inputs)
    size = sum(computed_bytes(node) for node in part)
    call.args = (function, size, counts["rows"], counts["tokens"], token_dims, _token_dim(leaving), *inputs)
    call.meta = dict(leaving.meta)
    leaving.replace_all_uses_with(call, delete_user_cb=lambda user: user not in members)
    for node in reversed(part):
        if not node.users:
            graph.erase_node(node)

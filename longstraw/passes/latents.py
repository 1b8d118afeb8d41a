"""The latents of an attention: a narrower per-token state that its keys and values are built from.

Used by insert_state. Multi-head latent attention (arXiv 2405.04434) projects hidden states down to a few
hundred numbers per token and builds the keys and values of all heads from them. The cheapest cut between the hidden
states and the two operands, at most one contraction before them, finds those numbers in any model; it is taken where
they are a small part of keys and values, for they are built again whenever a span attends.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from longstraw.arch.rules import arguments, emit, packet, tensors
from longstraw.arch.views import REARRANGES
from longstraw.layout import Rows, Tokens, bytes_per_token
from longstraw.passes.carve import runs_over_tokens
from longstraw.passes.min_cut import min_cut
from longstraw.passes.modes import restore_autocast
from longstraw.stages import Expansion, Located

aten = torch.ops.aten
_SMALL_PART = 3
"""Keys and values must have at least this many times the bytes of the latents."""
_NEVER = 1 << 40
_CONTRACTIONS = (aten.linear, aten.matmul, aten.bmm, aten.mm, aten.einsum)
_LINEAR = (
    *REARRANGES,
    aten.view,
    aten.select,
    aten.split,
    aten.split_with_sizes,
    aten.chunk,
    operator.getitem,
    aten.cat,
    aten.slice_scatter,
    aten.to,
    aten.neg,
    aten.clone,
    aten.contiguous,
)
"""Ops whose result is linear in all of their tensor operands together."""
_EMPTY = (aten.new_empty, aten.empty, aten.empty_like, aten.new_zeros, aten.zeros, aten.zeros_like)


@dataclass(frozen=True)
class Latents:
    """What an attention keeps instead of keys and values.

    Attributes:
        node: the latents `[rows, 1, tokens, width]` in the segment's graph.
        expansion: builds keys and values from them.
        inputs: nodes of the segment's graph that the expansion reads beside them.
    """

    node: fx.Node
    expansion: Expansion
    inputs: tuple[fx.Node, ...]


def find_latents(
    graph: fx.Graph, key: fx.Node, value: fx.Node, *, root: torch.nn.Module, step: Located
) -> Latents | None:
    """Return the latents of an attention, inserted into the graph before its operands, or None.

    Args:
        graph: a segment's graph whose nodes carry layouts and the nodes of the step that they come from.
        key, value: the attention's operands `[rows, heads, tokens, width]`.
        root: holds the graph's constants.
        step: says which ops read other tokens, or count them.
    """
    near = _near(key, value, step)
    region = [node for node in graph.nodes if node in near]
    if not any(packet(node.target) in _CONTRACTIONS for node in region):
        return None
    cut = min_cut(
        region,
        users=lambda n: n.users,
        is_source=lambda n: any(x not in near and _is_far(x, step) for x in n.all_input_nodes),
        is_sink=lambda n: False,
        is_end=lambda n: n in (key, value),
        cost=_bytes,
        near_sink=True,
    )
    forms = [form for form in map(_form, cut) if form is not None]
    if sum(map(_bytes, cut)) * _SMALL_PART > sum(map(_bytes, {key, value})) or len(forms) < len(cut):
        return None
    if len({n.meta["layout"][0] for n in cut}) != 1:  # they can't be put side by side
        return None
    return _build(graph, key, value, dict(zip(cut, forms, strict=True)), root, step)


def _bytes(node: fx.Node) -> int:
    value = node.meta["val"]
    return bytes_per_token(node.meta["layout"], value) if isinstance(value, torch.Tensor) else _NEVER


def _is_fixed(node: fx.Node, step: Located) -> bool:
    """Return whether a value can't be built again for other tokens: it reads others, or says where a token stands."""
    origin = node.meta.get("origin")
    return node.op != "call_function" or (origin is not None and (step.mixes(origin) or origin in step.local))


def _is_far(node: fx.Node, step: Located) -> bool:
    """Return whether a value that is not near has numbers of tokens."""
    return runs_over_tokens(node) or (node.op == "call_function" and _is_fixed(node, step))


def _near(key: fx.Node, value: fx.Node, step: Located) -> set[fx.Node]:
    """Return the per-token values from which at most one contraction leads to the operands."""
    contractions: dict[fx.Node, int] = {}
    stack = [(key, 0), (value, 0)]
    while stack:
        node, count = stack.pop()
        known = contractions.get(node, -1) >= count
        if known or count > 1 or _is_fixed(node, step) or not runs_over_tokens(node):
            continue
        contractions[node] = count
        stack.extend((x, count + (packet(node.target) in _CONTRACTIONS)) for x in node.all_input_nodes)
    return set(contractions)


def _form(node: fx.Node) -> str | None:
    """Return how a value becomes `[rows, 1, tokens, width]`: "three" or "four" dims now; None when it can't."""
    layout = node.meta.get("layout")
    if not isinstance(node.meta.get("val"), torch.Tensor) or not layout or len(layout) not in (3, 4):
        return None
    first, *middle, tokens, width = layout
    plain = all(isinstance(factor, tuple) for factor in width)
    right = first in ((), (Rows(),)) and len(tokens) == 1 and isinstance(tokens[0], Tokens) and plain
    if not right or any(dim != () for dim in middle):
        return None
    return "four" if middle else "three"


def _build(
    graph: fx.Graph, key: fx.Node, value: fx.Node, cut: dict[fx.Node, str], root: torch.nn.Module, step: Located
) -> Latents:
    latents = _joined(graph, cut, step)
    inner = fx.Graph()
    named = {name: inner.placeholder(name) for name in ("rows", "tokens")}
    env: dict[fx.Node, fx.Node] = {n: named[n.name] for n in graph.nodes if n.name in named}
    inputs: list[fx.Node] = []
    behind = _behind(key, value, set(cut))
    outside = [x for node in graph.nodes if node in behind for x in node.all_input_nodes if x not in behind]
    for x in dict.fromkeys(outside):
        if x not in env and x not in cut and x.op != "get_attr":
            env[x] = inner.placeholder(f"input_{len(inputs)}")
            inputs.append(x)
    state = inner.placeholder("latents")
    state.meta = {"val": latents.meta["val"]}
    at = 0
    for node, form in cut.items():
        width, dtype = int(node.meta["val"].shape[-1]), node.meta["val"].dtype
        piece = emit(inner, latents, aten.slice.Tensor, state, 3, at, at + width) if len(cut) > 1 else state
        piece = emit(inner, latents, aten.to.dtype, piece, dtype) if piece.meta["val"].dtype != dtype else piece
        env[node] = emit(inner, latents, aten.squeeze.dim, piece, 1) if form == "three" else piece
        at += width
    for node in graph.nodes:
        if node in behind or (node.op == "get_attr" and node in outside):
            env[node] = inner.node_copy(node, env.__getitem__)
    inner.output((env[key], env[value]))
    module = restore_autocast(fx.GraphModule(root, inner))
    shapes = [x.meta["val"].shape for x in (key, value)]
    sizes = [int(shape[d]) for shape in shapes for d in (1, 3)]
    linear = _is_linear(inner, state)
    return Latents(latents, Expansion(module, sizes[0], sizes[1], sizes[2], sizes[3], linear), tuple(inputs))


def _behind(key: fx.Node, value: fx.Node, cut: set[fx.Node]) -> set[fx.Node]:
    """Return the nodes between the cut and the operands that run over tokens, operands included."""
    found: set[fx.Node] = set()
    stack = [key, value]
    while stack:
        node = stack.pop()
        made = runs_over_tokens(node) or not isinstance(node.meta.get("val"), torch.Tensor)
        if node in found or node in cut or node.op != "call_function" or not made:
            continue
        found.add(node)
        stack.extend(node.all_input_nodes)
    return found


def _joined(graph: fx.Graph, cut: dict[fx.Node, str], step: Located) -> fx.Node:
    """Insert the latents, side by side, after the last of the values that they consist of, in the widest dtype.

    They count as coming from one that gradients flow through, if there is any: others may be of positions alone.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    at = max(cut, key=order.__getitem__)
    dtype = functools.reduce(torch.promote_types, (node.meta["val"].dtype for node in cut))
    parts: list[fx.Node] = []

    def insert(op: Any, *args: Any, like: fx.Node, layout: Any) -> fx.Node:
        nonlocal at
        with graph.inserting_after(at):
            at = emit(graph, like, op, *args)
        at.meta["layout"] = layout
        return at

    for node, form in cut.items():
        layout = node.meta["layout"]
        if form == "three":
            layout = (layout[0], (), *layout[1:])
            node = insert(aten.unsqueeze.default, node, 1, like=node, layout=layout)
        if node.meta["val"].dtype != dtype:
            node = insert(aten.to.dtype, node, dtype, like=node, layout=layout)
        parts.append(node)
    if len(parts) == 1:
        return parts[0]
    width = sum(int(part.meta["val"].shape[-1]) for part in parts)
    layout = (*parts[0].meta["layout"][:-1], ((width, width),))
    like = next((part for part in parts if part.meta.get("origin") in step.learns), parts[0])
    return insert(aten.cat.default, parts, -1, like=like, layout=layout)


def _is_linear(graph: fx.Graph, state: fx.Node) -> bool:
    """Return whether everything that depends on the state is linear in it."""
    depends = {state}
    for node in graph.nodes:
        if node.op == "output" or not depends.intersection(node.all_input_nodes) or packet(node.target) in _EMPTY:
            continue
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and not value.is_floating_point():
            return False
        if not _keeps_linear(node, depends):
            return False
        depends.add(node)
    return True


def _keeps_linear(node: fx.Node, depends: set[fx.Node]) -> bool:
    """Return whether an op's result is linear where those of its operands in `depends` are."""
    name, operands = packet(node.target), tensors((node.args, node.kwargs))  # twice where it is an operand twice
    used = [x for x in operands if x in depends]
    if name is aten.linear:
        return node.args[0] in depends and len(used) == 1 and arguments(node)["bias"] is None
    if name in _CONTRACTIONS or name is aten.mul:
        return len(used) == 1
    if name is aten.div:
        return node.args[0] in depends and len(used) == 1 and not node.kwargs
    if name in (aten.add, aten.sub):
        return len(used) == len(node.args) == 2
    return name in _LINEAR and all(x in depends or packet(x.target) in _EMPTY for x in operands)

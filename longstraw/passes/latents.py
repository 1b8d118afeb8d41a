"""The latents of an attention: a narrower per-token state that its keys and values are built from.

Used by insert_state. Multi-head latent attention (arXiv 2405.04434) projects hidden states down to a few
hundred numbers per token and builds the keys and values of all heads from them. The cheapest cut between the hidden
states and the two operands, at most one contraction before them, finds those numbers in any model; it is taken where
they are a small part of keys and values, for they are built again whenever a span attends.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from longstraw import ops
from longstraw.arch.rules import arguments, packet, tensors
from longstraw.layout import Rows, Sizes, Tokens, has
from longstraw.passes.min_cut import min_cut
from longstraw.passes.modes import restore_autocast
from longstraw.stages import Expansion

aten = torch.ops.aten
_SMALL_PART = 3
"""Keys and values must have at least this many times the bytes of the latents."""
_CONTRACTIONS = (aten.linear, aten.matmul, aten.bmm, aten.mm, aten.einsum)
_LINEAR = (
    aten.reshape,
    aten.view,
    aten.expand,
    aten.unsqueeze,
    aten.squeeze,
    aten.transpose,
    aten.permute,
    aten.slice,
    aten.select,
    aten.split,
    aten.split_with_sizes,
    aten.chunk,
    aten.cat,
    aten.repeat,
    aten.repeat_interleave,
    aten.slice_scatter,
    aten.to,
    aten.neg,
    aten.add,
    aten.sub,
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
    graph: fx.Graph, key: fx.Node, value: fx.Node, *, root: torch.nn.Module, sizes: Sizes
) -> Latents | None:
    """Return the latents of an attention, inserted into the graph before its operands, or None.

    Args:
        graph: a segment's graph whose nodes carry layouts.
        key, value: the attention's operands `[rows, heads, tokens, width]`.
        root: holds the graph's constants.
        sizes: of the step.
    """
    depth = _depths(key, value)
    region = [node for node in graph.nodes if node in depth]
    if not any(packet(node.target) in _CONTRACTIONS for node in region):
        return None
    cut = min_cut(
        region,
        users=lambda n: n.users,
        is_source=lambda n: _counts(n) or any(x not in depth and _over_tokens(x) for x in n.all_input_nodes),
        is_sink=lambda n: False,
        is_end=lambda n: n in (key, value),
        cost=lambda n: sizes.bytes_per_token(n.meta["val"]) if isinstance(n.meta["val"], torch.Tensor) else 1 << 40,
        near_sink=True,
    )
    whole = sum(sizes.bytes_per_token(n.meta["val"]) for n in {key, value})
    kept = sum(sizes.bytes_per_token(n.meta["val"]) for n in cut)
    forms = [_form(n) for n in cut]
    if kept * _SMALL_PART > whole or None in forms:
        return None
    if len({(n.meta["val"].dtype, n.meta["layout"][0]) for n in cut}) != 1:  # they can't be put side by side
        return None
    return _build(graph, key, value, cut, [form or "" for form in forms], depth, root)


def _over_tokens(node: fx.Node) -> bool:
    return any(has(dim, Tokens) for dim in _dims(node))


def _counts(node: fx.Node) -> bool:
    """Return whether a value depends on where its tokens stand: it can't be built again for others."""
    return packet(node.target) in (aten.arange, aten.cumsum, aten.rand, aten.rand_like)


def _dims(node: fx.Node) -> Iterable[Any]:
    layout = node.meta.get("layout") or ()
    several = isinstance(node.meta.get("val"), (tuple, list))
    return [dim for one in layout for dim in one] if several else layout


def _depths(key: fx.Node, value: fx.Node) -> dict[fx.Node, int]:
    """Return the per-token values before the operands, with the most contractions between: none or one."""
    depth: dict[fx.Node, int] = {}
    stack = [(key, 0), (value, 0)]
    while stack:
        node, contractions = stack.pop()
        mixes = (
            node.op != "call_function"
            or node.target in (ops.attention, ops.attend, ops.select, ops.choose)
            or not _over_tokens(node)
        )
        if mixes or contractions > 1 or depth.get(node, -1) >= contractions:
            continue
        depth[node] = contractions
        more = contractions + (packet(node.target) in _CONTRACTIONS)
        stack.extend((x, more) for x in node.all_input_nodes)
    return depth


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
    graph: fx.Graph,
    key: fx.Node,
    value: fx.Node,
    cut: list[fx.Node],
    forms: list[str],
    depth: dict[fx.Node, int],
    root: torch.nn.Module,
) -> Latents:
    latents = _joined(graph, cut, forms)
    inner = fx.Graph()
    rows, tokens = inner.placeholder("rows"), inner.placeholder("tokens")
    env: dict[fx.Node, fx.Node] = {
        n: {"rows": rows, "tokens": tokens}[n.name] for n in graph.nodes if n.name in ("rows", "tokens")
    }
    inputs: list[fx.Node] = []
    behind = _behind(key, value, set(cut))
    outside = [x for node in graph.nodes if node in behind for x in node.all_input_nodes if x not in behind]
    for x in dict.fromkeys(outside):
        if x not in env and x not in cut and x.op != "get_attr":
            env[x] = inner.placeholder(f"input_{len(inputs)}")
            inputs.append(x)
    state = inner.placeholder("latents")
    at = 0
    for node, form in zip(cut, forms, strict=True):
        width = int(node.meta["val"].shape[-1])
        piece = inner.call_function(aten.slice.Tensor, (state, 3, at, at + width)) if len(cut) > 1 else state
        env[node] = inner.call_function(aten.squeeze.dim, (piece, 1)) if form == "three" else piece
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
        computed = node.op == "call_function" and (
            _over_tokens(node) or not isinstance(node.meta.get("val"), torch.Tensor)
        )
        if node in found or node in cut or not computed:
            continue
        found.add(node)
        stack.extend(node.all_input_nodes)
    return found


def _joined(graph: fx.Graph, cut: list[fx.Node], forms: list[str]) -> fx.Node:
    """Insert the latents, side by side, after the last of the values that they consist of."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    at = max(cut, key=order.__getitem__)
    parts = []
    for node, form in zip(cut, forms, strict=True):
        if form == "three":
            with graph.inserting_after(at):
                at = graph.call_function(aten.unsqueeze.default, (node, 1))
            layout = node.meta["layout"]
            at.meta = {**node.meta, "val": node.meta["val"].unsqueeze(1), "layout": (layout[0], (), *layout[1:])}
            node = at
        parts.append(node)
    if len(parts) == 1:
        return parts[0]
    with graph.inserting_after(at):
        joined = graph.call_function(aten.cat.default, (parts, -1), name="latents")
    width = sum(int(part.meta["val"].shape[-1]) for part in parts)
    layout = parts[0].meta["layout"]
    joined.meta = {
        **parts[0].meta,
        "val": torch.cat([part.meta["val"] for part in parts], -1),
        "layout": (*layout[:-1], ((width, width),)),
    }
    return joined


def _is_linear(graph: fx.Graph, state: fx.Node) -> bool:
    """Return whether everything that depends on the state is linear in it."""
    depends = {state}
    for node in graph.nodes:
        used = [x for x in tensors((node.args, node.kwargs)) if x in depends]  # twice where it is an operand twice
        used = used or [x for x in node.all_input_nodes if x in depends]
        if node.op == "output" or not used:
            continue
        name, others = packet(node.target), [x for x in tensors((node.args, node.kwargs)) if x not in depends]
        if name in _EMPTY:
            continue
        if node.target is operator.getitem or name is operator.getitem:
            linear = True
        elif name is aten.linear:
            linear = node.args[0] in depends and len(used) == 1 and arguments(node)["bias"] is None
        elif name in _CONTRACTIONS or name is aten.mul:
            linear = len(used) == 1
        elif name is aten.div:
            linear = node.args[0] in depends and len(used) == 1 and not node.kwargs
        elif name in (aten.add, aten.sub):
            linear = len(used) == len(node.args) == 2
        else:
            linear = name in _LINEAR and all(packet(x.target) in _EMPTY for x in others)
        value = node.meta.get("val")
        linear = linear and not (isinstance(value, torch.Tensor) and not value.is_floating_point())
        if not linear:
            return False
        depends.add(node)
    return True

"""find_branches: which nodes belong to which pass of a model over the tokens, and what kind of value each node is.

In: `Normalised`. Out: `Branched`. The kinds:

    size        a number known from the inputs' shapes
    light       at most a few numbers per token, computed from inputs: ids, padding masks, positions, temperatures
    invariant   depends on parameters only
    block       two token dims, computed from light values: masks and biases; never built whole
    given       hidden values that come with the inputs (embeddings passed in), before any parameter acts on them
    region      hidden values of the model, everything with a width from the embedding to the logits
    tail        narrow values computed from hidden ones, with no hidden value after them: log-probabilities to the loss

A branch is a set of region and tail nodes that hidden values connect: one pass over the tokens. Passes that compute the
same are one branch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from longstraw import compat, ops
from longstraw.arch import associative, views
from longstraw.arch import aten as aten_rules
from longstraw.arch.rules import arguments, op_name, packet, tensors
from longstraw.arch.scans import may_mix
from longstraw.compat import expression
from longstraw.errors import StaticTokens, UnsupportedOp, user_line
from longstraw.layout import Sizes
from longstraw.passes.gradients import flow
from longstraw.passes.same_passes import merge_same_passes
from longstraw.scans.opaque import NAMESPACE
from longstraw.stages import Branched, Input, Normalised

aten = torch.ops.aten
NARROW = 4
"""A value with at most this many numbers per token is small enough to be held for all rows and tokens."""
NARROW_INDEX = 16
"""The same for ints and bools, which have no gradient."""
_SMALL_CONSTANT = 1 << 20


def find_branches(step: Normalised) -> Branched:
    """Return the step with the kind of every node, and its branches."""
    graph = step.module.graph
    sizes = _find_sizes(graph)
    kinds = _find_kinds(graph, step.inputs, sizes)
    trained = frozenset(i.name for i in step.inputs if i.requires_grad)
    branches, passes = merge_same_passes(
        step.module, _components(graph, kinds), flow(graph, trained=trained), mixes=_mixes
    )
    left = set(graph.nodes)
    kinds.update((node, "region") for branch in branches for node in branch)
    return Branched(
        step.module,
        step.inputs,
        step.options,
        sizes,
        {node: kind for node, kind in kinds.items() if node in left},
        branches,
        passes,
        flow(graph, trained=trained),
    )


def has_region(step: Normalised) -> bool:
    """Return whether a graph contains a model: something that reads a table by tokens, or attends."""
    return any(True for _ in _entries(step.module.graph))


def _entries(graph: fx.Graph) -> Any:
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is ops.attention:
            shape = node.args[0].meta["val"].shape
            yield node, shape[0], shape[2]
        elif getattr(node.target, "namespace", "") == NAMESPACE:
            inputs: Any = node.args[0]
            shape = inputs[0].meta["val"].shape
            yield node, shape[0], shape[1]
        elif packet(node.target) is aten.embedding:
            shape = arguments(node)["indices"].meta["val"].shape
            if len(shape) == 2:
                yield node, shape[0], shape[1]


def _mixes(node: fx.Node) -> bool:
    return node.target in (ops.attention, ops.select) or may_mix(node)


def _find_sizes(graph: fx.Graph) -> Sizes:
    """Return the sizes of rows and tokens, told by a mixing op, or by the token embedding when there is none."""
    for node, rows, tokens in sorted(_entries(graph), key=lambda entry: _certainty(entry[0])):
        if not expression(tokens).free_symbols:
            raise _static(graph, node, int(tokens))
        return Sizes(rows, tokens, windows=_windows(graph, Sizes(rows, tokens)))
    raise AssertionError("a graph without a model was given to find_branches")


def _static(graph: fx.Graph, entry: fx.Node, tokens: int) -> StaticTokens:
    """Return the refusal of a constant length: at the op that takes it as a number, if there is one."""
    for node in graph.nodes:
        name = packet(node.target)
        along = name is aten.take_along_dim and tokens in arguments(node)["self"].meta["val"].shape
        if along or (name in (aten.linspace, aten.logspace) and arguments(node)["steps"] == tokens):
            return StaticTokens(
                tokens,
                where=user_line(node.meta.get("stack_trace")),
                remedy=f"PyTorch traces {op_name(node)} for one size only: write it with "
                + ("gather." if along else "torch.arange."),
            )
    return StaticTokens(tokens, where=user_line(entry.meta.get("stack_trace")))


def _windows(graph: fx.Graph, sizes: Sizes) -> set[int]:
    """Return the plain numbers of tokens that rows are cut to, as those of responses of one length."""
    found: set[int] = set()
    for node in graph.nodes:
        if packet(node.target) not in (aten.slice, aten.narrow):
            continue
        a = arguments(node)
        before, after = (expression(x.meta["val"].shape[a["dim"]]) for x in (a["self"], node))
        if sizes.counts_tokens(before) and after.is_Integer and after > 1:
            found.add(int(after))
    return found


def _certainty(node: fx.Node) -> int:
    """Return how far down the list of what tells rows and tokens an op is: a combine function may scan any dim."""
    if packet(node.target) is aten.embedding:
        return 1
    return 2 if packet(node.target) in associative.RULES else 0


def token_dims(value: torch.Tensor, sizes: Sizes) -> int:
    """Return how many of a value's dims have a size that depends on the number of tokens."""
    return sum(sizes.counts_tokens(size) for size in value.shape)


def _find_kinds(graph: fx.Graph, inputs: tuple[Input, ...], sizes: Sizes) -> dict[fx.Node, str]:
    trains = {i.name: i.requires_grad for i in inputs}
    kinds: dict[fx.Node, str] = {}
    pure: set[fx.Node] = set()  # region nodes that come from light values only
    for node in graph.nodes:
        if node.op == "output":
            continue
        if any(compat.depends_on_data(size) for value in _values(node) for size in value.shape):
            raise UnsupportedOp(
                f"The size of {op_name(node)}'s result depends on data.",
                where=user_line(node.meta.get("stack_trace")),
                remedy="Spans are planned before anything runs. Models that send tokens to experts through Python "
                "lists or nonzero() usually have another implementation: see config._experts_implementation.",
            )
        known = {x: "light" if x in pure else kinds[x] for x in node.all_input_nodes}
        kinds[node] = _kind(node, known, trains, sizes)
        if kinds[node] == "light" and any(x in pure for x in node.all_input_nodes):
            kinds[node] = "region"  # a narrow part of a wide value, such as half of a rotary embedding
        if kinds[node] == "region" and all(kind in ("light", "size") for kind in known.values()):
            pure.add(node)
    for node in reversed(list(graph.nodes)):
        if node in pure and node.users and all(kinds.get(user) == "block" for user in node.users):
            kinds[node] = "block"  # a table on its way to a mask
    kinds.update((node, "given") for node in pure if kinds[node] == "region" and _cuts_a_table(node))
    _mark_joined_inputs(graph, kinds, sizes)
    _mark_tail(graph, kinds, sizes)
    return kinds


def _values(node: fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    found = value if isinstance(value, (tuple, list)) else [value]
    return [v for v in found if isinstance(v, torch.Tensor)]


def _kind(node: fx.Node, kinds: dict[fx.Node, str], trains: dict[str, bool], sizes: Sizes) -> str:
    values = _values(node)
    if not values:
        return "size"
    symbolic = any(expression(size).free_symbols for value in values for size in value.shape)
    wide = any(_is_wide(value, sizes) for value in values)
    square = any(token_dims(value, sizes) > 1 for value in values)
    if node.op == "placeholder":
        if symbolic and wide and not square:
            return "given"
        symbols = sizes.rows_expr.free_symbols | sizes.tokens_expr.free_symbols
        runs = any(expression(size).free_symbols & symbols for value in values for size in value.shape)
        return "invariant" if trains[node.name] and not runs else "block" if square else "light"
    if node.op == "get_attr":
        return "light"
    operands = {kinds[x] for x in node.all_input_nodes} - {"size"}
    if _mixes(node) and not (may_mix(node) and operands <= {"light"}):
        return "region"  # also where all weights so far are frozen
    if "region" in operands:
        return "region"
    if "invariant" in operands:
        return "region" if symbolic else "invariant"
    if "given" in operands:
        return "given" if all(_is_given(x, kinds, sizes) for x in tensors((node.args, node.kwargs))) else "region"
    if square or "block" in operands:
        return "block"
    if not symbolic:
        return "light" if sizes.width(values[0]) <= _SMALL_CONSTANT else "invariant"
    return "region" if wide else "light"


def _cuts_a_table(node: fx.Node) -> bool:
    """Return whether a table of positions, as of a rotary embedding, is cut to the number of tokens."""
    source = node.args[0] if packet(node.target) in (aten.slice, aten.narrow) else None
    return isinstance(source, fx.Node) and not any(expression(size).free_symbols for size in source.meta["val"].shape)


def _mark_joined_inputs(graph: fx.Graph, kinds: dict[fx.Node, str], sizes: Sizes) -> None:
    """Count embeddings that are joined along the token dim, prompt to response, as given: they are computed whole."""
    for node in graph.nodes:
        if node.op != "call_function" or packet(node.target) is not aten.cat or kinds[node] not in ("region", "given"):
            continue
        a = arguments(node)
        whole, parts = (
            sizes.shape(node.meta["val"])[a["dim"]],
            [sizes.shape(x.meta["val"])[a["dim"]] for x in a["tensors"]],
        )
        if whole != sizes.tokens or whole in parts:
            continue
        before: set[fx.Node] = set()
        stack = [node]
        while stack:
            at = stack.pop()
            if at not in before and kinds[at] in ("region", "given"):
                before.add(at)
                stack.extend(at.all_input_nodes)
        if not any(_mixes(x) for x in before):
            kinds.update(dict.fromkeys(before, "given"))


def _is_wide(value: torch.Tensor, sizes: Sizes, parts: int = 1) -> bool:
    """Return whether a value of so many parts has too many numbers per token to be held for all rows and tokens."""
    return sizes.width(value) > parts * (NARROW if value.is_floating_point() or value.is_complex() else NARROW_INDEX)


def _is_given(node: fx.Node, kinds: dict[fx.Node, str], sizes: Sizes) -> bool:
    """Return whether an operand is an input's value, and not a (frozen) weight."""
    value = node.meta["val"]
    symbolic = any(expression(size).free_symbols for size in value.shape)
    return kinds[node] == "given" or (kinds[node] == "light" and (symbolic or sizes.width(value) <= NARROW))


def _mark_tail(graph: fx.Graph, kinds: dict[fx.Node, str], sizes: Sizes) -> None:
    """Mark narrow region values, and values of single tokens, with no hidden value of every token after them."""
    of_rows = _of_single_tokens(graph, kinds, sizes)
    joined = _narrow_parts(graph, kinds, sizes)

    def narrow(node: fx.Node) -> bool:
        return _is_narrow(node, sizes, joined[node])

    leads_on: set[fx.Node] = set()
    for node in reversed(list(graph.nodes)):
        if kinds.get(node) != "region":
            continue
        after = any(user in leads_on for user in node.users)
        of_hidden = not may_mix(node) or any(x in joined and not narrow(x) for x in node.all_input_nodes)
        wide = not (node in of_rows or narrow(node)) or (_mixes(node) and of_hidden)
        if after or wide:
            leads_on.add(node)
        else:
            kinds[node] = "tail"


def is_single_token(node: fx.Node) -> bool:
    """Return whether a value is what one token of each row has, without a dim for it: `hidden[:, -1]`."""
    if packet(node.target) is not aten.squeeze or not isinstance(node.args[0], fx.Node):
        return False
    return any(_has_one_token(node.args[0], dim) for dim in _dropped(node))


def _has_one_token(node: fx.Node, dim: int) -> bool:
    """Return whether a dim of size 1 goes back to a slice of a dim whose size is no number."""
    rank, seen, stack = node.meta["val"].ndim, set[fx.Node](), [node]
    while stack:
        at = stack.pop()
        value = at.meta.get("val")
        if at in seen or not isinstance(value, torch.Tensor) or value.ndim != rank or expression(value.shape[dim]) != 1:
            continue
        seen.add(at)
        if packet(at.target) is aten.slice and arguments(at)["dim"] % rank == dim:
            source: Any = at.args[0]
            if expression(source.meta["val"].shape[dim]).free_symbols:
                return True
        stack.extend(at.all_input_nodes)
    return False


def _dropped(squeeze: fx.Node) -> list[int]:
    rank = squeeze.args[0].meta["val"].ndim  # type: ignore[union-attr]
    dims = arguments(squeeze).get("dim", range(rank))
    return [d % rank for d in ([dims] if isinstance(dims, int) else dims)]


def _of_single_tokens(graph: fx.Graph, kinds: dict[fx.Node, str], sizes: Sizes) -> set[fx.Node]:
    """Return hidden values that single tokens have, and what is made of them alone."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if kinds.get(node) != "region" or any(token_dims(value, sizes) for value in _values(node)):
            continue
        before = [x for x in node.all_input_nodes if kinds[x] == "region"]
        if is_single_token(node) or (before and all(x in found for x in before)):
            found.add(node)
    return found


def _narrow_parts(graph: fx.Graph, kinds: dict[fx.Node, str], sizes: Sizes) -> dict[fx.Node, int]:
    """Return of how many narrow values each region value is joined, as those of rows that the model ran one by one.

    Ops that sum over a dim make something else of them, and start again at 1.
    """
    joined: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if kinds.get(node) != "region":
            continue
        name = packet(node.target)
        before = [joined[x] for x in node.all_input_nodes if x in joined]
        keeps = aten_rules.is_pointwise(node.target) or aten_rules.RULES.get(name) in _KEEP_PARTS
        joined[node] = max(before, default=1) if keeps else 1
        if name in (aten.stack, aten.cat):
            parts = [x for x in tensors(node.args) if x in joined]
            if all(_is_narrow(x, sizes, joined[x]) for x in parts):
                joined[node] = sum(joined[x] for x in parts)
    return joined


_KEEP_PARTS = (
    aten_rules.reduced,
    aten_rules.like_first,
    views.reshaped,
    views.sliced,
    views.selected,
    views.concatenated,
)


def _is_narrow(node: fx.Node, sizes: Sizes, parts: int) -> bool:
    """Return whether a value has few numbers per token for each of the parts that it is joined of."""
    return not any(_is_wide(value, sizes, parts) for value in _values(node))


def _components(graph: fx.Graph, kinds: dict[fx.Node, str]) -> tuple[tuple[fx.Node, ...], ...]:
    """Return the connected sets of region nodes that contain a model, in graph order, each with its tail left out."""
    leader: dict[fx.Node, fx.Node] = {}

    def find(node: fx.Node) -> fx.Node:
        while leader[node] is not node:
            leader[node] = leader[leader[node]]
            node = leader[node]
        return node

    region = [node for node in graph.nodes if kinds.get(node) == "region"]
    for node in region:
        leader[node] = node
        for operand in node.all_input_nodes:
            if kinds.get(operand) == "region":
                leader[find(operand)] = find(node)
    for one, other in _met_by_results(graph, kinds, {node: find(node) for node in region}):
        leader[find(one)] = find(other)
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in region:
        groups.setdefault(find(node), []).append(node)
    return tuple(tuple(group) for group in groups.values())


def _met_by_results(
    graph: fx.Graph, kinds: dict[fx.Node, str], leader: dict[fx.Node, fx.Node]
) -> list[tuple[fx.Node, fx.Node]]:
    """Return the sets without a mixing op, such as embeddings of labels, each with the pass that its values meet.

    They meet in narrow values; a set that meets several passes is no part of any.
    """
    mixing = {leader[node] for node in leader if _mixes(node)}
    reach: dict[fx.Node, set[fx.Node]] = {node: {one} for node, one in leader.items()}
    met: dict[fx.Node, set[fx.Node]] = {one: set() for one in leader.values() if one not in mixing}
    for node in graph.nodes:
        if kinds.get(node) == "tail":
            reach[node] = set().union(*(reach.get(x, set()) for x in node.all_input_nodes))
            for one in reach[node] - mixing:
                met[one] |= reach[node] & mixing
    return [(one, next(iter(found))) for one, found in met.items() if len(found) == 1]

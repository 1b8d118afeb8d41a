"""Recognises attention, however a model spells it, and rewrites it as one `longstraw.ops.attention` node.

Two spellings: `aten.scaled_dot_product_attention`, and the explicit one: a product of queries and keys, elementwise
work on the scores (scale, soft cap, masks, biases), softmax over keys, a product with the values. A column of sinks
joined to the scores before the softmax and cut off after it is understood too, and sinks that rescale the output.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from longstraw import ops
from longstraw.arch import factors, selection, sinks
from longstraw.arch.aten import is_pointwise
from longstraw.arch.constants import filled_with
from longstraw.arch.heads import Heads
from longstraw.arch.rules import arguments, emit, packet, tensors
from longstraw.arch.selected import split
from longstraw.arch.spellings import CASTS, VIEWS
from longstraw.blocks import HIDING
from longstraw.compat import expression
from longstraw.errors import DropoutActive, MixesTokens, user_line

aten = torch.ops.aten
_PRODUCTS = (aten.matmul, aten.bmm, aten.baddbmm)
_MINUS = (aten.sub, aten.subtract)
_SOFTMAX = (aten.softmax, aten._softmax, aten._safe_softmax)


def recognise(
    module: fx.GraphModule, *, is_score: Callable[[fx.Node], bool], learns: frozenset[fx.Node] = frozenset()
) -> None:
    """Rewrite every attention of the graph in place.

    Args:
        module: an ATen graph without in-place ops.
        is_score: whether a node has two token dims (its last two).
        learns: what gradients flow through.
    """
    for node in list(module.graph.nodes):
        if node.op != "call_function":
            continue
        if packet(node.target) is aten.scaled_dot_product_attention:
            _from_library_call(module.graph, node)
        elif packet(node.target) in _SOFTMAX and is_score(node.args[0]):
            _from_explicit(module, node, is_score, learns)
    module.graph.eliminate_dead_code()


def _from_library_call(graph: fx.Graph, node: fx.Node) -> None:
    a = arguments(node)
    if a["dropout_p"]:
        raise dropout_error(node, a["dropout_p"])
    width = a["query"].meta["val"].shape[-1]
    scale = a["scale"] if a["scale"] is not None else 1.0 / math.sqrt(width)
    with graph.inserting_before(node):
        operands = [a[name] for name in ("query", "key", "value")]
        give_up = functools.partial(_give_up, node)
        heads = Heads(graph, operands, batch=_batch_of(a["query"]), plain=True, give_up=give_up)
        masks = () if a["attn_mask"] is None else (heads.mask(a["attn_mask"]),)
        new = _insert(graph, node, heads.operands, masks, bool(a["is_causal"]), scale, None, (), None)
        result = heads.result(new, node)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def dropout_error(node: fx.Node, p: float) -> DropoutActive:
    """Return the error for an active dropout."""
    return DropoutActive(
        f"A dropout with p={p} is active: scoring and replay would draw different masks.",
        where=user_line(node.meta.get("stack_trace")),
        remedy="Set the dropout probabilities of the model and of its adapters (lora_dropout) to 0, or call "
        "model.eval(): gradients flow in eval mode too.",
    )


@dataclass
class _Scores:
    """What happened to the scores between the product and the softmax, walked upwards."""

    learns: frozenset[fx.Node]
    masks: list[fx.Node] = field(default_factory=list)
    steps: list[fx.Node] = field(default_factory=list)  # elementwise ops on the scores, softmax side first
    sink: fx.Node | None = None
    passed: list[fx.Node] = field(default_factory=list)  # every form of them, the product's result included
    batch: tuple[Any, ...] | None = None  # rows and heads, where the scores have a dim for each


def _from_explicit(
    module: fx.GraphModule, softmax: fx.Node, is_score: Callable[[fx.Node], bool], learns: frozenset[fx.Node]
) -> None:
    graph = module.graph
    found = _Scores(learns)
    node = softmax.args[0]
    assert isinstance(node, fx.Node)
    if arguments(softmax)["dim"] % softmax.meta["val"].ndim != softmax.meta["val"].ndim - 1:
        _give_up(softmax, "it does not go over the keys, the last dim")
    while packet(node.target) not in _PRODUCTS:
        found.passed.append(node)
        if node.meta["val"].ndim == 4:
            found.batch = tuple(node.meta["val"].shape[:2])
        node = _step_up(module, node, found, is_score, softmax)
    a = arguments(node)
    query, key = (a["batch1"], a["batch2"]) if "batch1" in a else (a["self"], a["other"] if "other" in a else a["mat2"])
    scale = 1.0
    if packet(node.target) is aten.baddbmm:
        scale = float(a["alpha"])
        if a["beta"] != 0:
            if a["beta"] != 1 or not _is_block(a["self"], is_score):
                _give_up(softmax, "its summand is scaled")
            found.masks.append(a["self"])
    found.passed.append(node)
    product, value = _step_down(softmax, found, is_score)
    scale, score, score_inputs = _score_function(module, node, found, scale)
    rescaled = _rescaled(softmax, product, found)
    output = product if rescaled is None else rescaled.node
    with graph.inserting_before(output):
        key = _transposed(graph, key)
        heads = Heads(
            graph,
            (query, key, value),
            batch=found.batch or _batch_of(query),
            plain=not score_inputs and rescaled is None and found.sink is None,
            give_up=functools.partial(_give_up, softmax),
        )
        sink = None if rescaled is None else rescaled.sink(graph)
        if found.sink is not None:
            sink = sinks.of_heads(graph, found.sink, heads.count)
            if sink is None:
                _give_up(softmax, "its sinks are other than one for each head, or one for all")
        masks, score_inputs = (tuple(map(heads.mask, values)) for values in (found.masks, score_inputs))
        new = _insert(graph, product, heads.operands, masks, False, scale, score, score_inputs, sink)
        result = heads.result(new, product)
        if output.meta["val"].dtype != product.meta["val"].dtype:
            result = emit(graph, output, aten.to.dtype, result, output.meta["val"].dtype)
    output.replace_all_uses_with(result)
    graph.erase_node(output)


def _rescaled(softmax: fx.Node, product: fx.Node, found: _Scores) -> sinks.Rescaled | None:
    """Return the rescaling of an attention's output that stands for a sink, if any; refuse others by its scores."""
    sums = sinks.sums_of(found.passed)
    if not sums:
        return None
    rescaled = sinks.rescaled(softmax, product)
    if rescaled is None or len(sums) > 1 or found.sink is not None:
        _give_up(softmax, "the logsumexp of its scores has a use that is not `output * sigmoid(logsumexp - sink)`")
    return rescaled


def _is_block(node: Any, is_score: Callable[[fx.Node], bool]) -> bool:
    """Return whether a value can be a mask or bias of the scores: it has two token dims or broadcasts to them."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor) and node.meta["val"].ndim >= 2


def _step_up(
    module: fx.GraphModule, node: fx.Node, found: _Scores, is_score: Callable[[fx.Node], bool], softmax: fx.Node
) -> fx.Node:
    """Record one op between softmax and product; return the operand that holds the scores."""
    name = packet(node.target)
    if node.op != "call_function":
        _give_up(softmax, "its scores don't come from a product of queries and keys")
    if name in CASTS or name in VIEWS:
        return node.args[0]  # type: ignore[return-value]
    if name in (aten.cat, aten.concat) and found.sink is None:
        parts: Any = node.args[0]
        if len(parts) == 2 and parts[1].meta["val"].shape[-1] == 1:
            found.sink = parts[1]
            return parts[0]
    operands = tensors(node.args)
    if name in _MINUS and len(operands) == 2 and _is_row_maximum(operands[1], operands[0]):
        return operands[0]  # softmax(x - max(x)) = softmax(x)
    scored = [x for x in operands if is_score(x) and filled_with(x) is None and selection.reaches_product(x)]
    if len(set(scored)) != 1 or not (is_pointwise(node.target) or name in (aten.where, aten.masked_fill)):
        _give_up(softmax, f"{name} stands between the scores and the softmax")
    scores = scored[0]
    others = [x for x in operands if x is not scores]
    product = factors.masked(
        node,
        is_mask=lambda x: _varies_with_tokens(x) and x not in found.learns,  # a bool mask would drop its gradient
        is_score=selection.reaches_product,
    )
    if product is not None and not found.steps:
        with module.graph.inserting_before(node):
            found.masks.append(product.seen(module.graph))
        found.masks[-1].meta["finite"] = True
        found.passed.append(product.product)
        return product.scores
    if name is aten.add and len(others) == 1 and not found.steps and _varies_with_tokens(others[0]):
        if node.kwargs.get("alpha", 1) != 1:
            _give_up(softmax, "its mask is scaled")
        found.masks.append(others[0])
    elif name in _MINUS and operands == [scores, *others] and not found.steps and _varies_with_tokens(others[0]):
        if node.kwargs.get("alpha", 1) != 1:
            _give_up(softmax, "its mask is scaled")
        with module.graph.inserting_before(node):
            found.masks.append(emit(module.graph, node, aten.neg.default, others[0]))
    elif name is aten.masked_fill and not found.steps:
        a = arguments(node)
        found.masks.append(_as_mask(node, a["mask"], a["value"], keep_where=False))
    elif name is aten.where and not found.steps and node.args[1] is scores:
        found.masks.append(_as_mask(node, node.args[0], node.args[2], keep_where=True))
    elif name is aten.where and not found.steps and node.args[2] is scores:
        found.masks.append(_as_mask(node, node.args[0], node.args[1], keep_where=False))
    else:
        found.steps.append(node)
    return scores


def _as_mask(node: fx.Node, condition: Any, value: Any, *, keep_where: bool) -> fx.Node:
    """Insert the bool mask (True = seen) that a fill with a hugely negative value stands for."""
    number = filled_with(value)
    if number is None or not number <= HIDING:
        raise _not_attention(node, "it fills scores with a value that is not hugely negative")
    with node.graph.inserting_before(node):
        seen = emit(node.graph, node, aten.alias.default if keep_where else aten.logical_not.default, condition)
    seen.meta["finite"] = True
    return seen


def _varies_with_tokens(node: fx.Node) -> bool:
    """Return whether a summand of the scores differs between queries or between keys."""
    shape = node.meta["val"].shape[-2:]
    return any(bool(expression(size).free_symbols) for size in shape)


def _is_row_maximum(node: fx.Node, of: fx.Node) -> bool:
    if node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
    if packet(node.target) not in (aten.max, aten.amax) or node.args[0] is not of or len(node.args) < 2:
        return False
    dims = node.args[1]
    return [dim % of.meta["val"].ndim for dim in (dims if isinstance(dims, (list, tuple)) else [dims])] == [
        of.meta["val"].ndim - 1
    ]


def _step_down(softmax: fx.Node, found: _Scores, is_score: Callable[[fx.Node], bool]) -> tuple[fx.Node, fx.Node]:
    """Return the product with the values that uses the softmax, and the values."""
    node = softmax
    while True:
        users = [user for user in node.users if user.op == "call_function"]
        if len(users) != 1:
            _give_up(softmax, "its weights are used more than once")
        user = users[0]
        name = packet(user.target)
        if name in (aten.matmul, aten.bmm):
            left, right = user.args[:2]
            if left is not node:
                _give_up(softmax, "its weights are not the left operand of a product with the values")
            return user, right  # type: ignore[return-value]
        if name in CASTS or name in VIEWS or (name is aten.slice and found.sink is not None):
            node = user
        elif name is aten.mul and all(not isinstance(x, fx.Node) or x is node for x in user.args):
            _give_up(softmax, "its weights are scaled")
        else:
            _give_up(softmax, f"{name} stands between its weights and the values")


def _score_function(
    module: fx.GraphModule, product: fx.Node, found: _Scores, scale: float
) -> tuple[float, fx.Node | None, tuple[fx.Node, ...]]:
    """Fold plain factors into the scale; put what remains in a graph `(raw, *inputs) -> scores`."""
    steps = list(reversed(found.steps))  # product side first
    scaled = product
    while steps:
        node = steps[0]
        numbers = [x for x in node.args if isinstance(x, (int, float)) and not isinstance(x, bool)]
        if packet(node.target) is aten.mul and len(numbers) == 1 and len(tensors(node.args)) == 1:
            scale *= float(numbers[0])
        elif packet(node.target) is aten.div and len(numbers) == 1 and len(node.args) == 2 and not node.kwargs:
            scale /= float(numbers[0])
        else:
            break
        scaled = steps.pop(0)
    if not steps:
        return scale, None, ()
    graph = fx.Graph()
    raw = graph.placeholder("raw")
    env: dict[fx.Node, fx.Node] = {}
    inputs: list[fx.Node] = []
    previous: fx.Node = raw
    chain = set(steps)
    for node in steps:
        for operand in tensors((node.args, node.kwargs)):
            if operand in env:
                continue
            if operand in chain or _leads_to(operand, scaled, chain):
                env[operand] = previous
            else:
                env[operand] = graph.placeholder(f"input_{len(inputs)}")
                inputs.append(operand)
        previous = graph.node_copy(node, lambda n: env[n])
        env[node] = previous
    graph.output(previous)
    name = f"score_{sum(1 for key in module._modules if key.startswith('score_'))}"
    module.add_submodule(name, fx.GraphModule({}, graph))
    with module.graph.inserting_before(product):
        function = module.graph.get_attr(name)
    return scale, function, tuple(inputs)


def _leads_to(node: fx.Node, scaled: fx.Node, chain: set[fx.Node]) -> bool:
    """Return whether casts and views alone lead from a step of the chain or the scaled products to this node."""
    while node is not scaled and node not in chain:
        if packet(node.target) not in (*CASTS, *VIEWS):
            return False
        node = node.args[0]  # type: ignore[assignment]
    return True


def _insert(
    graph: fx.Graph,
    like: fx.Node,
    qkv: list[fx.Node],
    masks: tuple[fx.Node, ...],
    causal: bool,
    scale: float,
    score: fx.Node | None,
    score_inputs: tuple[fx.Node, ...],
    sink: fx.Node | None,
) -> fx.Node:
    masks, selected, finite = split(graph, masks)
    node = graph.call_function(
        ops.attention, (*qkv, masks, causal, float(scale), score, score_inputs, sink, selected), name="attention"
    )
    query, value = qkv[0].meta["val"], qkv[2].meta["val"]
    node.meta = {"finite_selection": finite} | {
        **like.meta,
        "val": query.new_empty((*query.shape[:3], value.shape[3]), dtype=like.meta["val"].dtype),
    }
    return node


def _transposed(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Return the transpose of a key operand `[..., width, tokens]`: the value it was transposed from, if any."""
    if packet(node.target) in (aten.transpose, aten.swapaxes):
        rank = node.meta["val"].ndim
        if {d % rank for d in node.args[1:3]} == {rank - 1, rank - 2}:
            return node.args[0]  # type: ignore[return-value]
    return emit(graph, node, aten.transpose.int, node, -1, -2)


def _batch_of(node: fx.Node) -> tuple[Any, ...] | None:
    """Return rows and heads of an operand `[rows * heads, tokens, width]`, from the value that was flattened."""
    while node.meta["val"].ndim == 3 and packet(node.target) in (*VIEWS, *CASTS, aten.mul, aten.transpose):
        node = node.args[0]  # type: ignore[assignment]
    return tuple(node.meta["val"].shape[:2]) if node.meta["val"].ndim == 4 else None


def _not_attention(node: fx.Node, why: str) -> MixesTokens:
    return MixesTokens(
        f"softmax over the tokens is not recognised as attention: {why}.",
        where=user_line(node.meta.get("stack_trace")),
        remedy="Use the model's `sdpa` attention implementation, or extend longstraw/arch/attention.py.",
    )


def _give_up(node: fx.Node, why: str) -> Any:
    raise _not_attention(node, why)

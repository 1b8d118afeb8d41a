"""normalise: one spelling per meaning.

In: `Traced`. Out: `Normalised`, a functional graph in which
- in-place ops became their functional forms, written back through slices;
- grad-mode switches became `detach`, autocast switches became node metadata;
- copies, casts and views that change nothing are gone, and so is dead code;
- dropout with p = 0 is gone; an active one is refused;
- cross entropy is log-softmax and gather;
- a loop over rows, or over pieces of tokens, is one computation of all of them;
- a selection of keys is one `longstraw.ops.select` node; attention, in every spelling, one `longstraw.ops.attention`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from longstraw.arch import attention as attention_rule
from longstraw.arch import selection
from longstraw.arch.rules import arguments, emit, packet, tensors
from longstraw.compat import expression
from longstraw.errors import MixesRows, user_line
from longstraw.passes.functional import make_functional
from longstraw.passes.modes import resolve_dtypes, resolve_modes
from longstraw.passes.reroll import reroll
from longstraw.passes.trace import copy_graph
from longstraw.stages import Normalised, Traced

aten = torch.ops.aten
_END = 2**62


def normalise(traced: Traced) -> Normalised:
    """Return the step with one spelling per meaning."""
    module = copy_graph(traced.module)
    resolve_dtypes(module.graph)
    _refuse_batch_statistics(module.graph)
    _drop_dropout(module.graph)
    make_functional(module.graph, trained=frozenset(i.name for i in traced.inputs if i.requires_grad))
    resolve_modes(module.graph)
    _drop_no_ops(module.graph)
    _decompose_losses(module.graph)
    reroll(module.graph)
    _eliminate_dead_code(module.graph)
    selection.recognise(module, is_score=_two_token_dims(module.graph))
    attention_rule.recognise(module, is_score=_two_token_dims(module.graph))
    _eliminate_dead_code(module.graph)
    module.graph.lint()
    module.recompile()
    return Normalised(module, traced.inputs, traced.options)


def _refuse_batch_statistics(graph: fx.Graph) -> None:
    """Refuse batch norm in training mode here: updating its running statistics would be refused as an in-place op."""
    for node in graph.nodes:
        if packet(node.target) is aten.batch_norm and arguments(node)["training"]:
            raise MixesRows(
                "aten.batch_norm mixes rows: in training mode its statistics are taken over all rows and tokens.",
                where=user_line(node.meta.get("stack_trace")),
                remedy="Put it in eval mode, where it uses its running statistics.",
            )


def _drop_dropout(graph: fx.Graph) -> None:
    """Put the operand in place of every dropout that is off, which eager returns itself; refuse an active one."""
    for node in list(graph.nodes):
        if packet(node.target) in (
            aten.dropout,
            aten.dropout_,
            aten.feature_dropout,
            aten.feature_dropout_,
            aten.alpha_dropout,
            aten.alpha_dropout_,
            aten.feature_alpha_dropout,
            aten.feature_alpha_dropout_,
            aten.native_dropout,
        ):
            a = arguments(node)
            if a["p"] and a["train"]:
                raise attention_rule.dropout_error(node, a["p"])
            if packet(node.target) is not aten.native_dropout:
                node.replace_all_uses_with(a["input"] if "input" in a else a["self"])
                graph.erase_node(node)


def _eliminate_dead_code(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)


def _two_token_dims(graph: fx.Graph) -> Any:
    """Return a predicate: do a node's last two dims both have the (symbolic) size of the row?"""

    def check(node: Any) -> bool:
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        if not isinstance(value, torch.Tensor) or value.ndim < 2:
            return False
        a, b = (expression(size) for size in value.shape[-2:])
        return bool(a.free_symbols) and (a == b or bool(b.free_symbols & a.free_symbols))

    return check


# --- no-ops -----------------------------------------------------------------------------------------------------------


_ALIASED_OPS = {
    getattr(aten, alias): getattr(aten, name)
    for alias, name in (
        ("multiply", "mul"),
        ("subtract", "sub"),
        ("divide", "div"),
        ("true_divide", "div"),
        ("negative", "neg"),
        ("absolute", "abs"),
        ("greater", "gt"),
        ("greater_equal", "ge"),
        ("less", "lt"),
        ("less_equal", "le"),
        ("not_equal", "ne"),
        ("concat", "cat"),
        ("concatenate", "cat"),
        ("swapaxes", "transpose"),
        ("swapdims", "transpose"),
        ("special_expit", "sigmoid"),
        ("clip", "clamp"),
        ("broadcast_to", "expand"),
        ("__and__", "bitwise_and"),
        ("__or__", "bitwise_or"),
        ("__xor__", "bitwise_xor"),
    )
}


def _drop_no_ops(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        canonical = _ALIASED_OPS.get(packet(node.target))
        if canonical is not None and hasattr(canonical, node.target._overloadname):
            node.target = getattr(canonical, node.target._overloadname)
        source = _unchanged(node)
        if source is not None:
            node.replace_all_uses_with(source)
            graph.erase_node(node)
        elif packet(node.target) in (aten.view, aten._unsafe_view):
            node.target = aten.reshape.default  # strides may differ without the copies that were dropped


def _unchanged(node: fx.Node) -> fx.Node | None:
    """Return the operand that this node merely repeats, or None."""
    name = packet(node.target)
    if name in (aten.clone, aten.contiguous, aten.alias, aten.lift_fresh_copy, aten.lift_fresh):
        return node.args[0]  # type: ignore[return-value]
    operands = tensors((node.args, node.kwargs))
    if not operands:
        return None
    if name in (aten.cat, aten.concat):
        filled = [x for x in operands if tuple(x.meta["val"].shape) != (0,)]  # cat ignores these, as of an empty cache
        if len(filled) == 1:
            return filled[0]
        if len(filled) < len(operands):
            node.args = (filled, *node.args[1:])
        return None
    before: Any = operands[0].meta["val"]
    after: Any = node.meta.get("val")
    if name in (aten.to, aten._to_copy):
        same = before.dtype == after.dtype and before.device == after.device
        return operands[0] if same else None
    if name is aten.detach:
        return None if before.is_floating_point() or before.is_complex() else operands[0]
    if name is aten.slice:
        a = arguments(node)
        end = a["end"]
        whole = a["start"] in (0, None) and a["step"] == 1 and (end is None or (isinstance(end, int) and end >= _END))
        return operands[0] if whole else None
    if name in (aten.view, aten.reshape, aten._unsafe_view, aten.expand) and before.ndim == after.ndim:
        same = all(expression(x) == expression(y) for x, y in zip(before.shape, after.shape, strict=True))
        return operands[0] if same else None
    return None


# --- losses -----------------------------------------------------------------------------------------------------------

_MEAN, _SUM = 1, 2


def _decompose_losses(graph: fx.Graph) -> None:
    """Write cross entropy and nll losses as log-softmax, gather, and the reduction."""
    for node in list(graph.nodes):
        name = packet(node.target)
        if node.op != "call_function" or name not in (aten.cross_entropy_loss, aten.nll_loss, aten.nll_loss_nd):
            continue
        a = arguments(node)
        if a["weight"] is not None:
            continue
        with graph.inserting_before(node):
            new = _negative_log_likelihood(
                node,
                a["self"],
                a["target"],
                reduction=int(a["reduction"]),
                ignored=a["ignore_index"],
                logits=name is aten.cross_entropy_loss,
                smoothing=float(a.get("label_smoothing") or 0.0),
            )
        new.meta = {**node.meta}
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def _negative_log_likelihood(
    like: fx.Node, x: fx.Node, target: fx.Node, *, reduction: int, ignored: Any, logits: bool, smoothing: float
) -> fx.Node:
    """Write out a loss on class numbers, or on probabilities of classes, as `torch.nn.functional.cross_entropy` has it.

    Smoothing mixes the target with the uniform distribution.
    """
    call = functools.partial(emit, like.graph, like)
    dim = 1 if x.meta["val"].ndim > 1 else 0
    logp = call(aten.log_softmax.int, x, dim) if logits else x
    spread = call(aten.neg.default, call(aten.mean.dim, logp, [dim])) if smoothing else None
    if target.meta["val"].is_floating_point():
        loss = call(aten.neg.default, call(aten.sum.dim_IntList, call(aten.mul.Tensor, logp, target), [dim]))
        if spread is not None:
            loss = _mixed(call, loss, spread, smoothing)
        if reduction in (_MEAN, _SUM):
            return call(aten.mean.default if reduction == _MEAN else aten.sum.default, loss)
        return loss
    valid = call(aten.ne.Scalar, target, ignored)
    safe = call(aten.where.self, valid, target, call(aten.zeros_like.default, target))
    picked = call(aten.gather.default, logp, dim, call(aten.unsqueeze.default, safe, dim))
    loss = call(aten.neg.default, call(aten.squeeze.dim, picked, dim))
    if spread is not None:
        loss = _mixed(call, loss, spread, smoothing)
    loss = call(aten.where.self, valid, loss, call(aten.zeros_like.default, loss))
    if reduction in (_MEAN, _SUM):
        loss = call(aten.sum.default, loss)
    if reduction == _MEAN:
        loss = call(aten.div.Tensor, loss, call(aten.sum.default, valid))
    return loss


def _mixed(call: Callable[..., fx.Node], loss: fx.Node, spread: fx.Node, smoothing: float) -> fx.Node:
    kept, added = call(aten.mul.Scalar, loss, 1 - smoothing), call(aten.mul.Scalar, spread, smoothing)
    return call(aten.add.Tensor, kept, added)

"""Writes losses on class numbers, or on probabilities of classes, as log-softmax, gather, and the reduction.

Used by normalise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from longstraw.arch.rules import arguments, emit, packet

aten = torch.ops.aten
_MEAN, _SUM = 1, 2


def write_out_losses(graph: fx.Graph) -> None:
    """Write cross entropy and nll losses as log-softmax, gather, and the reduction."""
    for node in list(graph.nodes):
        name = packet(node.target)
        if node.op != "call_function" or name not in (aten.cross_entropy_loss, aten.nll_loss, aten.nll_loss_nd):
            continue
        a = arguments(node)
        with graph.inserting_before(node):
            new = _negative_log_likelihood(
                node,
                a["self"],
                a["target"],
                weight=a["weight"],
                reduction=int(a["reduction"]),
                ignored=a["ignore_index"],
                logits=name is aten.cross_entropy_loss,
                smoothing=float(a.get("label_smoothing") or 0.0),
            )
        new.meta = {**node.meta}
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def _negative_log_likelihood(
    like: fx.Node,
    x: fx.Node,
    target: fx.Node,
    *,
    weight: fx.Node | None,
    reduction: int,
    ignored: Any,
    logits: bool,
    smoothing: float,
) -> fx.Node:
    """Write out a loss on class numbers, or on probabilities of classes, as `torch.nn.functional.cross_entropy` has it.

    Smoothing mixes the target with the uniform distribution. A class may have a weight.
    """
    call = functools.partial(emit, like.graph, like)
    dim = 1 if x.meta["val"].ndim > 1 else 0
    logp = call(aten.log_softmax.int, x, dim) if logits else x
    of_class = logp
    if weight is not None and (smoothing or target.meta["val"].is_floating_point()):
        of_class = call(aten.mul.Tensor, logp, _along(call, weight, dim, x.meta["val"].ndim))
    spread = call(aten.neg.default, call(aten.mean.dim, of_class, [dim])) if smoothing else None
    if target.meta["val"].is_floating_point():
        loss = call(aten.neg.default, call(aten.sum.dim_IntList, call(aten.mul.Tensor, of_class, target), [dim]))
        if spread is not None:
            loss = _mixed(call, loss, spread, smoothing)
        if reduction in (_MEAN, _SUM):
            return call(aten.mean.default if reduction == _MEAN else aten.sum.default, loss)
        return loss
    valid = call(aten.ne.Scalar, target, ignored)
    safe = call(aten.where.self, valid, target, call(aten.zeros_like.default, target))
    picked = call(aten.gather.default, logp, dim, call(aten.unsqueeze.default, safe, dim))
    loss = call(aten.neg.default, call(aten.squeeze.dim, picked, dim))
    count = valid
    if weight is not None:
        of_target = call(aten.index.Tensor, weight, [safe])
        loss = call(aten.mul.Tensor, loss, of_target)
        count = call(aten.where.self, valid, of_target, call(aten.zeros_like.default, of_target))
    if spread is not None:
        loss = _mixed(call, loss, spread, smoothing)
    loss = call(aten.where.self, valid, loss, call(aten.zeros_like.default, loss))
    if reduction in (_MEAN, _SUM):
        loss = call(aten.sum.default, loss)
    if reduction == _MEAN:
        loss = call(aten.div.Tensor, loss, call(aten.sum.default, count))
    return loss


def _along(call: Callable[..., fx.Node], weight: fx.Node, dim: int, ndim: int) -> fx.Node:
    """Return weights of classes with dims for everything after the classes' dim."""
    for _ in range(ndim - dim - 1):
        weight = call(aten.unsqueeze.default, weight, -1)
    return weight


def _mixed(call: Callable[..., fx.Node], loss: fx.Node, spread: fx.Node, smoothing: float) -> fx.Node:
    kept, added = call(aten.mul.Scalar, loss, 1 - smoothing), call(aten.mul.Scalar, spread, smoothing)
    return call(aten.add.Tensor, kept, added)

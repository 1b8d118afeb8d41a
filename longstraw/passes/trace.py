"""trace: from Dynamo's graph of the step to an ATen graph with symbolic sizes.

In: the graph that Dynamo captured (torch functions and methods). Out: `Traced`, a graph of ATen ops before autograd and
autocast, every node with the user's stack trace.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from longstraw import compat
from longstraw.options import Options
from longstraw.passes.custom_backward import check_custom_backwards, inline_forward
from longstraw.stages import Input, Traced


def trace(gm: fx.GraphModule, *, options: Options) -> Traced:
    """Trace a Dynamo graph to ATen.

    Args:
        gm: Dynamo's graph; its placeholders carry fake values.
        options: handed on.
    """
    check_custom_backwards(gm)
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    fakes = compat.fake_inputs(gm)
    module = compat.to_aten(lambda *args: _Inline(gm).run(*args), fakes)
    names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    inputs = tuple(
        Input(name, compat.source_name(node), isinstance(fake, torch.Tensor) and fake.requires_grad)
        for name, node, fake in zip(names, placeholders, fakes, strict=True)
    )
    return Traced(module, inputs, options)


class _Inline(fx.Interpreter):
    """Runs a Dynamo graph with its checkpointed regions inlined: replay recomputes anyway."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.ops.higher_order.tag_activation_checkpoint:
            body, *inputs = args
            return _Inline(body).run(*inputs)
        if target is torch.ops.higher_order.autograd_function_apply:
            forward, _, *inputs = args
            return inline_forward(
                forward, kwargs.get("non_differentiable_idx", ()), lambda body: _Inline(body).run(*inputs)
            )
        return super().call_function(target, args, kwargs)


def copy_graph(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a graph module that shares nothing but its constants."""
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node.op == "output":
            copied = graph.output(map_arg(node.args[0], values.__getitem__))
            copied.meta = dict(node.meta)
        else:
            values[node] = graph.node_copy(node, values.__getitem__)
    return fx.GraphModule(module, graph)


_MODEL_OPS = {"linear", "embedding", "matmul", "bmm", "addmm", "mm", "scaled_dot_product_attention", "conv1d"}


def may_have_model(gm: fx.GraphModule) -> bool:
    """Return whether a Dynamo graph applies weights or attends: only then is it worth a trace with symbolic sizes."""
    for node in gm.graph.nodes:
        name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
        if node.op in ("call_function", "call_method") and name in _MODEL_OPS:
            return True
    return False

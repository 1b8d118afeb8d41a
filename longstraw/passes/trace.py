"""trace: from Dynamo's graph of the step to an ATen graph with symbolic sizes.

In: the graph that Dynamo captured (torch functions and methods). Out: `Traced`, a graph of ATen ops before autograd and
autocast, every node with the user's stack trace.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from longstraw import compat
from longstraw.errors import BadInput, UnsupportedOp, user_line
from longstraw.options import Options
from longstraw.passes.custom_backward import check_custom_backwards, inline_forward
from longstraw.passes.written_inputs import return_writes
from longstraw.stages import Input, Traced


def trace(gm: fx.GraphModule, *, options: Options, written_out: Collection[Any] = ()) -> Traced:
    """Trace a Dynamo graph to ATen.

    Args:
        gm: Dynamo's graph; its placeholders carry fake values.
        options: handed on.
        written_out: composite ops of which the graph has what they are made of.
    """
    check_custom_backwards(gm)
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    fakes = compat.fake_inputs(gm)
    for node, fake in zip(placeholders, fakes, strict=True):
        if isinstance(fake, torch.Tensor) and 0 in [size for size in fake.shape if isinstance(size, int)]:
            shape = tuple(compat.hint(size) for size in fake.shape)
            raise BadInput(
                f"{compat.source_name(node)} is empty: its shape is {shape}.", remedy="Give it at least one entry."
            )
    _refuse_leaves_returned(gm)
    _refuse_hooks(gm)
    module = compat.to_aten(lambda *args: _Inline(gm).run(*args), fakes, written_out=written_out)
    names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    trained = [isinstance(fake, torch.Tensor) and fake.requires_grad for fake in fakes]
    written = return_writes(
        module.graph, trained=frozenset(n for n, learns in zip(names, trained, strict=True) if learns)
    )
    inputs = tuple(
        Input(name, compat.source_name(node), learns, name in written)
        for name, node, learns in zip(names, placeholders, trained, strict=True)
    )
    return Traced(module, inputs, options)


def _refuse_hooks(gm: fx.GraphModule) -> None:
    """Refuse hooks on gradients of values inside the step: replay sends gradients through other tensors, in parts."""
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if "register_hook" in (
                node.target,
                getattr(node.target, "_name", ""),
                getattr(node.target, "__name__", ""),
            ):
                raise UnsupportedOp(
                    "A hook is registered on the gradient of a value that the step computes: it would not be called.",
                    where=user_line(node.meta.get("stack_trace")),
                    remedy="Register hooks on parameters, which are called as ever, or change the loss instead.",
                )


def _refuse_leaves_returned(gm: fx.GraphModule) -> None:
    """Refuse a value that the step makes a leaf of autograd and returns: its `.grad` would stay empty."""
    returned = set(next(iter(reversed(gm.graph.nodes))).all_input_nodes)
    for node in gm.graph.find_nodes(op="call_method", target="requires_grad_"):
        if not returned.isdisjoint((node, node.args[0])):
            raise UnsupportedOp(
                "The step calls requires_grad_() on a value that it computes and returns: no gradient would reach it.",
                where=user_line(node.meta.get("stack_trace")),
                remedy="Make it before the step, call requires_grad_() there, and pass it in.",
            )


@dataclass(frozen=True)
class _Modes:
    """What held outside of an inference mode: whether gradients flow, and whether it was one."""

    grad: bool
    outer: bool


class _Inline(fx.Interpreter):
    """Runs a Dynamo graph for the tracer.

    Checkpointed regions are inlined: replay recomputes anyway. Inference mode becomes no_grad, `.data` detach. A value
    inside the graph that `requires_grad_()` was called on, as is done to frozen embeddings so that checkpoints see a
    gradient, stays as it is: parameters' gradients are the same.
    """

    _inference = False

    def _enter_inference_mode(self, enabled: bool) -> _Modes:
        before = _Modes(torch.is_grad_enabled(), self._inference)
        self._inference = enabled
        torch._C._set_grad_enabled(not enabled)
        return before

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is compat.enter_inference_mode:
            return self._enter_inference_mode(*args)
        if target is compat.exit_inference_mode:
            self._inference = args[0].outer
            return torch._C._set_grad_enabled(args[0].grad)
        if target is torch._C._set_grad_enabled:
            return target(args[0] and not self._inference)
        if target is compat.allow_leaf_inside:
            return None
        if target is compat.read_data:
            return args[0].detach()
        if target is torch.ops.higher_order.tag_activation_checkpoint:
            body, *inputs = args
            return _Inline(body).run(*inputs)
        if target is torch.ops.higher_order.autograd_function_apply:
            forward, _, *inputs = args
            return inline_forward(
                forward, kwargs.get("non_differentiable_idx", ()), lambda body: _Inline(body).run(*inputs)
            )
        return super().call_function(target, args, kwargs)

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target == "requires_grad_":
            return args[0]
        if target == "item" and isinstance(args[0], torch.SymFloat):
            return args[0]
        return super().call_method(target, args, kwargs)


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


def drop_unused(graph: fx.Graph) -> None:
    """Erase what nothing reads, random numbers too."""
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)


def returns_hidden(gm: fx.GraphModule) -> bool:
    """Return whether values with a hidden dim leave a Dynamo graph: it is a piece of a model."""
    output = next(iter(reversed(gm.graph.nodes)))
    return any(_is_hidden(node.meta.get("example_value")) for node in output.all_input_nodes)


def hidden_inputs(gm: fx.GraphModule) -> list[str]:
    """Return the inputs of a Dynamo graph that a model computed in eager code."""
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    values = ((node, node.meta["example_value"]) for node in placeholders)
    return [compat.source_name(node) for node, value in values if _is_hidden(value) and value.grad_fn is not None]


def _is_hidden(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim > 2 and value.shape[-1] != 1


_MODEL_OPS = {"linear", "embedding", "matmul", "bmm", "addmm", "mm", "scaled_dot_product_attention", "conv1d"}


def may_have_model(gm: fx.GraphModule) -> bool:
    """Return whether a Dynamo graph applies weights or attends: only then is it worth a trace with symbolic sizes."""
    for node in gm.graph.nodes:
        name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
        if node.op in ("call_function", "call_method") and name in _MODEL_OPS:
            return True
    return False

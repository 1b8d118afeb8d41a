"""Custom autograd functions (`torch.autograd.Function`) inside the step.

The segment recomputes and differentiates ATen ops, so it can take a custom function's forward as ordinary ops only when
its custom backward is the derivative of that forward. That is checked here with numbers, before tracing; a function
that backpropagates something else (a straight-through estimator, a scaled gradient) is refused rather than
differentiated wrongly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from longstraw import compat
from longstraw.errors import UnsupportedOp, user_line

_POINTS = 3
_TOLERANCE = 1e-6


def check_custom_backwards(gm: fx.GraphModule) -> None:
    """Refuse custom functions of a Dynamo graph whose backward is not the derivative of their forward."""
    for node in gm.graph.nodes:
        if node.op != "call_function" or node.target is not torch.ops.higher_order.autograd_function_apply:
            continue
        forward, backward, *inputs = node.args
        run, differentiate = (without_grad_modes(getattr(gm, str(body.target))) for body in (forward, backward))
        values = [x.meta["example_value"] if isinstance(x, fx.Node) else x for x in inputs]
        try:
            error = max(_error(run, differentiate, values, seed) for seed in range(_POINTS))
        except Exception as problem:
            raise _refusal(node, f"its backward could not be compared with the derivative ({problem})") from problem
        if not error <= _TOLERANCE:
            raise _refusal(node, f"its backward is not the derivative of its forward (relative difference {error:.1e})")


def inline_forward(forward: Any, non_differentiable: Any, run: Any) -> Any:
    """Run a custom function's forward as ordinary ops; detach outputs that it declares non-differentiable."""
    outputs, _ = run(without_grad_modes(forward))
    if isinstance(outputs, Tensor):
        return outputs.detach() if 0 in non_differentiable else outputs
    return type(outputs)(x.detach() if i in non_differentiable else x for i, x in enumerate(outputs))


def without_grad_modes(body: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a body that doesn't switch grad mode (a custom forward runs without autograd)."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(body.graph, {}))
    for node in list(graph.nodes):
        if node.target is torch._C._set_grad_enabled:
            graph.erase_node(node)
    return fx.GraphModule(body, graph)


def _error(forward: fx.GraphModule, backward: fx.GraphModule, values: list[Any], seed: int) -> float:
    """Return the relative difference between the custom backward and the derivative at a random point."""
    generator = torch.Generator().manual_seed(seed)
    inputs = [_random(value, generator) for value in values]
    with torch.enable_grad():
        outputs, saved = forward(*inputs)
        listed = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        grads = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in listed]
        wanted = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
        pairs = [(x, g) for x, g in zip(listed, grads, strict=True) if x.requires_grad]
        expected = torch.autograd.grad([x for x, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
    with torch.no_grad():
        found = backward(*grads, *(x.detach() if isinstance(x, Tensor) else x for x in saved))
    found = [found] if isinstance(found, Tensor) or found is None else list(found)
    places = [i for i, x in enumerate(inputs) if isinstance(x, Tensor) and x.requires_grad]
    given = [found[i] for i in places] if len(found) == len(inputs) else [g for g in found if g is not None]
    difference = scale = 0.0
    for one, other in zip(expected, given, strict=True):
        one = torch.zeros(()) if one is None else one
        other = torch.zeros(()) if other is None else other
        difference = max(difference, float((one - other).abs().max()))
        scale = max(scale, float(one.abs().max()))
    return difference / max(scale, 1e-30)


def _random(value: Any, generator: torch.Generator) -> Any:
    if isinstance(value, torch.SymInt):
        return compat.hint(value)
    if not isinstance(value, Tensor):
        return value
    shape = [compat.hint(size) for size in value.shape]
    if not value.is_floating_point():
        return torch.zeros(shape, dtype=value.dtype)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_(value.requires_grad)


def _refusal(node: fx.Node, why: str) -> UnsupportedOp:
    return UnsupportedOp(
        f"A custom autograd function can't be rewritten: {why}.",
        where=user_line(node.meta.get("stack_trace")),
        remedy="Express its gradient with ordinary ops, e.g. y = x + (f(x) - x).detach() for a straight-through "
        "estimator.",
    )

"""What must hold after each pass. A failure here is a fault of longstraw, never of the user's program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from longstraw import ops
from longstraw.arch.rules import arguments, op_name, packet
from longstraw.layout import Rows, Shuffled, Tokens, is_dispatched
from longstraw.stages import Branched, Carved, Located, Lowered, Normalised, Partitioned, Traced, WithState

aten = torch.ops.aten


def check(record: Any) -> None:
    """Check a stage's record; raise AssertionError with the node and the promise that is broken."""
    _CHECKS[type(record)](record)


def _fail(node: fx.Node, promise: str) -> None:
    raise AssertionError(f"{node.format_node()}: {promise}")


def _traced(step: Traced) -> None:
    step.module.graph.lint()
    names = [node.name for node in step.module.graph.nodes if node.op == "placeholder"]
    assert names == [i.name for i in step.inputs], "inputs are described in the order of the placeholders"
    for node in step.module.graph.nodes:
        if node.op in ("call_module", "call_method"):
            _fail(node, "a traced graph calls functions only")


def _normalised(step: Normalised) -> None:
    step.module.graph.lint()
    for node in step.module.graph.nodes:
        if node.op != "call_function":
            continue
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            _fail(node, "no in-place op is left")
        if packet(node.target) in (aten.scaled_dot_product_attention, aten.dropout, aten.cross_entropy_loss):
            if packet(node.target) is aten.cross_entropy_loss and arguments(node)["weight"] is not None:
                continue
            _fail(node, "one spelling per meaning")
        if node.target is torch._C._set_grad_enabled:
            _fail(node, "no grad-mode switch is left")


def _branched(step: Branched) -> None:
    members = [node for branch in step.branches for node in branch]
    assert len(members) == len(set(members)), "a node belongs to one branch"
    region = {node for node, kind in step.kinds.items() if kind == "region"}
    assert set(members) == region, "every hidden value belongs to a branch"
    for node in step.module.graph.nodes:
        kind = step.kinds.get(node)
        operands = {step.kinds[x] for x in node.all_input_nodes} if node.op != "output" else set()
        if kind == "light" and operands & {"region", "tail", "block", "invariant", "given"}:
            _fail(node, "light values depend on light values only")
        if kind == "region" and "tail" in operands:
            _fail(node, "nothing hidden comes after the tail")


def _located(step: Located) -> None:
    for node, layout in step.layouts.items():
        value = node.meta["val"]
        values = value if isinstance(value, (tuple, list)) else (value,)
        layouts = layout if isinstance(value, (tuple, list)) else (layout,)
        if len(values) != len(layouts):
            _fail(node, "one layout for each output")
        for v, dims in zip(values, layouts, strict=True):
            if len(dims) != v.ndim:
                _fail(node, f"its layout has a dim for each of its {v.ndim} dims")
            for factor in (Rows, Tokens):
                if sum(_count(dim, factor) for dim in dims) > 1:
                    _fail(node, f"at most one dim runs over {factor.__name__.lower()}")
            if step.kinds[node] == "region" and not _sizes_agree(step, dims, v):
                _fail(node, "its layout has its sizes")
    for node, kind in step.kinds.items():
        if kind == "region" and node not in step.layouts:
            _fail(node, "every hidden value has a layout")


def _sizes_agree(step: Located, dims: Any, value: torch.Tensor) -> bool:
    sizes = step.sizes
    for dim, size in zip(dims, value.shape, strict=True):
        if any(isinstance(factor, Tokens) for factor in dim):
            continue  # sizes of windows may be traced as Max(0, ...) of what the slice says
        if sizes.of_dim(dim) != sizes.probe(size):
            return False
    return True


def _count(dim: Any, kind: type) -> int:
    return sum(_count(f.of, kind) if isinstance(f, Shuffled) else isinstance(f, kind) for f in dim)


def _carved(graph: Carved) -> None:
    graph.module.graph.lint()
    for node in graph.module.graph.nodes:
        if node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor) and "layout" not in node.meta:
            _fail(node, "every value of a segment carries its layout")
    names = [n.name for n in graph.module.graph.nodes if n.op == "placeholder"]
    assert names[:2] == ["rows", "tokens"], "rows and tokens come first"
    inputs = graph.inputs
    expected = 2 + len(inputs.parameters) + len(inputs.values) + len(inputs.tokens) + len(inputs.masks)
    assert len([n for n in names if not n.startswith("hidden_")]) == expected, "inputs are described in order"


def _partitioned(step: Partitioned) -> None:
    found = 0
    for segment in step.segments:
        found += len(segment.results)
        _carved(segment.body)
        for node in segment.frontier:
            if is_dispatched(step.step.layouts[node]):
                _fail(node, "heads run on parts of a span, and start at values that have a meaning there")
        assert sorted(i for head in segment.heads for i in head.results) == list(range(len(segment.results))), (
            "every result comes from one head"
        )
        for head in segment.heads:
            _carved(head.graph)
            assert len(head.layouts) == len(head.results), "every result has a layout"
    names = [n.name for n in step.objective.graph.nodes if n.op == "placeholder"]
    assert len(names) == len(step.step.inputs) + found, "the objective reads inputs and results"
    for node in step.objective.graph.nodes:
        if node.target in (ops.attention, ops.select):
            _fail(node, "no part of a model is left in the objective")


def _with_state(step: WithState) -> None:
    for branch in step.branches:
        for module in (branch.capture, branch.score, branch.relay):
            module.graph.lint()
            names = [n.name for n in module.graph.nodes if n.op == "placeholder"]
            assert [n for n in names if n.startswith("before_")] == [carry.name for carry in branch.carries], (
                "boundary states are inputs, in order"
            )
            for node in module.graph.nodes:
                if node.target in (ops.attention, ops.select):
                    _fail(node, "every attention and every selection reads state")
                if node.op == "call_function" and node.meta.get("origin") in step.partitioned.step.scans:
                    schema = getattr(node.target, "_schema", None)
                    if schema is not None:
                        _fail(node, "every scan is in its form on a span")
                if node.op == "placeholder" and node.name.startswith("mask_"):
                    _fail(node, "no mask is read whole")
        outputs = next(iter(reversed(branch.capture.graph.nodes))).args[0]
        assert len(outputs) == len(branch.slots) + len(branch.carries), "capture gives all state"
        for site in branch.sites:
            assert 0 <= site.key_slot < len(branch.slots) and 0 <= site.value_slot < len(branch.slots)
            assert all(0 <= index < len(branch.masks) for index in site.masks)


def _lowered(step: Lowered) -> None:
    step.prologue.graph.lint()
    located = step.step.partitioned.step
    for node in step.light:
        if located.kinds[node] not in ("light", "given", "size"):
            _fail(node, f"the prologue computes light values only, not {op_name(node)}")


_CHECKS: dict[type, Callable[[Any], None]] = {
    Traced: _traced,
    Normalised: _normalised,
    Branched: _branched,
    Located: _located,
    Partitioned: _partitioned,
    WithState: _with_state,
    Lowered: _lowered,
}

"""find_token_dim: which dim of every hidden value runs over tokens, which over rows.

In: `Branched`. Out: `Located`: a layout for every region node, and the layout in which each op reads its light
operands. Rules come from the user's `Options(rules=...)`, then `arch.layout_rules()`; elementwise ops need none. An op
without a rule is an error that names the user's line. In the tail (log-probabilities to loss) ops need not keep tokens
apart: a node without a layout there belongs to the objective.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from longstraw import arch, ops
from longstraw.arch import aten as aten_rules
from longstraw.arch import selection, views
from longstraw.arch.rules import LayoutRule, Reader, op_name, packet
from longstraw.errors import DropoutActive, LongstrawError, user_line
from longstraw.stages import Branched, Located


def find_token_dim(step: Branched) -> Located:
    """Return the step with the layout of every node of the model region."""
    table: dict[Any, LayoutRule] = {**arch.layout_rules(), **{rule.target: rule.layout for rule in step.options.rules}}
    kinds = step.kinds
    layouts: dict[fx.Node, Any] = {}
    reader = Reader(step.sizes, layouts, is_light=lambda node: kinds.get(node) in ("light", "given", "size"))
    for node in step.module.graph.nodes:
        kind = kinds.get(node)
        if kind == "region":
            layouts[node] = _layout(reader, node, table, kinds)
        elif kind == "tail" and all(kinds.get(x) != "tail" or x in layouts for x in node.all_input_nodes):
            demands = dict(reader.demands)
            try:
                layouts[node] = _layout(reader, node, table, kinds)
            except LongstrawError:
                reader.demands = demands
                if _reads_hidden(node, kinds):
                    raise
    return Located(
        step.module,
        step.inputs,
        step.options,
        step.sizes,
        kinds,
        step.branches,
        step.passes,
        step.learns,
        layouts,
        reader.demands,
        frozenset(reader.local),
        reader.scans,
    )


def _reads_hidden(node: fx.Node, kinds: Mapping[fx.Node, str]) -> bool:
    return any(kinds.get(x) == "region" for x in node.all_input_nodes)


def _layout(reader: Reader, node: fx.Node, table: Mapping[Any, LayoutRule], kinds: Mapping[fx.Node, str]) -> Any:
    if node.target is operator.getitem:
        return views.getitem(reader, node)
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        raise DropoutActive(
            f"{op_name(node)} draws random numbers inside the model: scoring and replay would draw different ones.",
            where=user_line(node.meta.get("stack_trace")),
            remedy="Draw them before the step and pass them in, or turn the noise off.",
        )
    rule = table.get(node.target)
    if node.target not in (ops.attention, ops.select) and any(kinds.get(x) == "block" for x in node.all_input_nodes):
        why = (
            selection.refusal(node)
            or "it combines hidden values with a mask or bias over pairs of tokens outside attention"
        )
        reader.unsupported(node, why)
    if rule is None:
        rule = aten_rules.pointwise if aten_rules.is_pointwise(node.target) else table.get(packet(node.target))
    if rule is None and isinstance(node.target, torch._ops.OpOverload):
        rule = table.get(node.target._schema.name)  # ops of libraries that may not be installed stand under their name
    if rule is None:
        reader.unsupported(node, "no rule says what it does along the token dim")
    try:
        return rule(reader, node)
    except LongstrawError:
        raise
    except Exception as error:
        reader.unsupported(node, f"its rule failed with {type(error).__name__}: {error}", cause=error)

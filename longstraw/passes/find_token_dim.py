"""find_token_dim: which dim of every hidden value runs over tokens, which over rows.

In: `Branched`. Out: `Located`: a layout for every region node, and the layout in which each op reads its light
operands. Rules come from the user's `Options(rules=...)`, then `arch.layout_rules()`; elementwise ops need none. An op
without a rule is an error that names the user's line. In the tail (log-probabilities to loss) ops need not keep tokens
apart: a node without a layout there belongs to the objective.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import fx

from longstraw import arch, compat, ops
from longstraw.arch import aten as aten_rules
from longstraw.arch import places, selection, views
from longstraw.arch.rules import LayoutRule, Reader, no_rule_for, op_name, packet
from longstraw.arch.same_sizes import Symbols
from longstraw.errors import DropoutActive, LongstrawError, UnsupportedOp, user_line
from longstraw.layout import Rows, Tokens, over_pairs
from longstraw.passes.find_branches import is_single_token
from longstraw.stages import Branched, Located

NO_RULE = "no rule says what it does along the token dim"


def find_token_dim(step: Branched) -> Located:
    """Return the step with the layout of every node of the model region."""
    table: dict[Any, LayoutRule] = {**arch.layout_rules(), **{rule.target: rule.layout for rule in step.options.rules}}
    kinds = step.kinds
    layouts: dict[fx.Node, Any] = {}
    vouched = {rule.target for rule in step.options.rules}
    symbols = Symbols.of(step.module.graph, {x.name: x.source for x in step.inputs})
    reader = Reader(
        step.sizes, layouts, is_light=lambda node: kinds.get(node) in ("light", "given", "size"), symbols=symbols
    )
    _ask_to_write_out(step, table)
    for node in step.module.graph.nodes:
        kind = kinds.get(node)
        if kind == "region" and is_single_token(node):
            reader.mixes_tokens(node, "it takes one token, and values of other tokens are computed with it")
        elif kind == "region":
            layouts[node] = _layout(reader, node, table, kinds, vouched)
        elif kind == "tail" and is_single_token(node):
            continue
        elif kind == "tail" and all(kinds.get(x) != "tail" or x in layouts for x in node.all_input_nodes):
            demands = dict(reader.demands)
            try:
                layouts[node] = _layout(reader, node, table, kinds, vouched)
            except LongstrawError:
                reader.demands = demands
                if _reads_hidden(node, kinds):
                    raise
            pairs = node in layouts and (over_pairs(layouts[node], Tokens) or over_pairs(layouts[node], Rows))
            if node in reader.scans or pairs:  # narrow: the objective computes it of all tokens at once
                reader.scans.pop(node, None)
                del layouts[node]
                reader.demands = demands
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


class Composite(UnsupportedOp):
    """Ops of the model that no rule knows, but which are made of others: the step can be traced with those.

    Attributes:
        refusal: what to raise if that is no use.
        ops: the overloads.
    """

    def __init__(self, refusal: UnsupportedOp, ops: frozenset[Any]) -> None:
        super().__init__(refusal.what, where=refusal.where, remedy=refusal.remedy)
        self.refusal, self.ops = refusal, ops


def _ask_to_write_out(step: Branched, table: Mapping[Any, LayoutRule]) -> None:
    hidden = [
        node
        for node in step.module.graph.nodes
        if (kind := step.kinds.get(node)) in ("region", "tail")
        and (kind == "region" or _reads_hidden(node, step.kinds))
        and compat.is_composite(node.target)
        and _rule(table, node.target) is None
    ]
    if hidden:
        raise Composite(no_rule_for(hidden[0], NO_RULE), frozenset(node.target for node in hidden))


def _rule(table: Mapping[Any, LayoutRule], target: Any) -> LayoutRule | None:
    """Return the rule of an op: of the overload, of elementwise ops, of the op, or of its name."""
    if target in table:
        return table[target]
    if aten_rules.is_pointwise(target):
        return aten_rules.pointwise
    found = table.get(packet(target))
    if found is None and isinstance(target, torch._ops.OpOverload):
        found = table.get(target._schema.name)  # ops of libraries that may not be installed stand under their name
    return found


def _reads_hidden(node: fx.Node, kinds: Mapping[fx.Node, str]) -> bool:
    return any(kinds.get(x) == "region" for x in node.all_input_nodes)


def _layout(
    reader: Reader,
    node: fx.Node,
    table: Mapping[Any, LayoutRule],
    kinds: Mapping[fx.Node, str],
    vouched: Container[Any],
) -> Any:
    rule = _rule(table, node.target)
    if node.target not in vouched and packet(node.target) not in vouched:  # a user's rule knows what its op reads
        places.check_use(reader, node)
    return places.marked(reader, node, _by_rule(reader, node, rule, kinds))


def _by_rule(reader: Reader, node: fx.Node, rule: LayoutRule | None, kinds: Mapping[fx.Node, str]) -> Any:
    if node.target is operator.getitem:
        return views.getitem(reader, node)
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        raise DropoutActive(
            f"{op_name(node)} draws random numbers inside the model: scoring and replay would draw different ones.",
            where=user_line(node.meta.get("stack_trace")),
            remedy="Draw them before the step and pass them in, or turn the noise off.",
        )
    if node.target not in (ops.attention, ops.select) and any(kinds.get(x) == "block" for x in node.all_input_nodes):
        why = (
            selection.refusal(node)
            or "it combines hidden values with a mask or bias over pairs of tokens outside attention"
        )
        reader.unsupported(node, why)
    if rule is None:
        reader.unsupported(node, NO_RULE)
    try:
        return rule(reader, node)
    except LongstrawError:
        raise
    except Exception as error:
        reader.unsupported(node, f"its rule failed with {type(error).__name__}: {error}", cause=error)

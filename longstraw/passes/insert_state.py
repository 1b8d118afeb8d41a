"""insert_state: what each mixing op needs of earlier tokens, and graphs that read and write it.

In: `Partitioned`. Out: `WithState`. A scan (recurrence, convolution, running sum) gets its boundary state before the
span as an input of the graphs, and gives the one after it as an output. For attention the state is keys and values.
Between the projection and the attention's operands stand ops that only rearrange and repeat numbers (head repetition,
transposes); the state is the cheapest value in bytes per token on that way from which the operand can be rebuilt: with
grouped-query attention, the keys and values before repetition. Where they are built from a
much narrower value (multi-head latent attention), that is the state (`latents.py`). What several attentions share is
one slot. Masks
become block programs.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from longstraw import ops
from longstraw.arch import masks as mask_rules
from longstraw.arch.rules import packet
from longstraw.arch.views import REARRANGES
from longstraw.blocks import BlockProgram
from longstraw.compat import users_expression
from longstraw.errors import UnsupportedMask, user_line
from longstraw.passes.carve import computed_bytes
from longstraw.passes.gradients import before
from longstraw.passes.latents import Latents, find_latents
from longstraw.passes.modes import restore_autocast
from longstraw.stages import (
    Carry,
    Carved,
    Chooser,
    Located,
    Partitioned,
    Segment,
    Site,
    Slot,
    SpanForm,
    Stateful,
    WithState,
)

aten = torch.ops.aten


def insert_state(step: Partitioned) -> WithState:
    """Return the step with every branch able to run span by span."""
    return WithState(step, tuple(_stateful(step.step, segment) for segment in step.segments))


def _stateful(step: Located, segment: Segment) -> Stateful:
    builder = _Builder(step, segment.body)
    for node in list(builder.graph.nodes):
        form = step.scans.get(node.meta.get("origin"))
        if node.target is ops.attention:
            builder.replace(node)
        elif node.target is ops.select:
            builder.choose(node)
        elif form is not None:
            builder.carry(node, form)
    return builder.finish(segment)


class _Builder:
    def __init__(self, step: Located, body: Carved) -> None:
        self.step = step
        self.original_masks = body.inputs.masks
        self.module, self.graph = body.module, fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        self.span = self.graph.placeholder("span")
        outputs: Any = ()
        for node in body.module.graph.nodes:
            if node.op == "output":
                outputs = map_arg(node.args[0], env.__getitem__)
            else:
                env[node] = self.graph.node_copy(node, env.__getitem__)
        self.frontier: tuple[fx.Node, ...] = outputs
        self.mask_of = {
            env[n]: original
            for n, original in zip(_placeholders(body.module, "mask_"), self.original_masks, strict=True)
        }
        self.rows, self.tokens = (n for n in self.graph.nodes if n.op == "placeholder" and n.name in ("rows", "tokens"))
        self.slots: dict[fx.Node, Slot] = {}
        self.latents: dict[tuple[fx.Node, fx.Node], Latents | None] = {}
        self.sites: list[Site] = []
        self.choosers: list[Chooser] = []
        self.chosen: dict[fx.Node, int] = {}
        self.carries: list[Carry] = []
        self.after: list[fx.Node] = []
        self.programs: list[tuple[BlockProgram, bool]] = []  # and whether unseen keys have a finite score
        self.program_of: dict[fx.Node, int] = {}

    def replace(self, node: fx.Node) -> None:
        """Turn one attention into its stateful form."""
        parts: Any = node.args
        query, key, value, masks, causal, scale, score, score_inputs, sink, selected = parts
        line = user_line(node.meta.get("stack_trace"))
        latents = self._latents(key, value)
        kept = [self._state(x, line) if latents is None else self._slot(latents.node, line) for x in (key, value)]
        places = [list(self.slots).index(x) for x in kept]
        shown = [self._mask(mask, line) for mask in masks]
        if self._learns(node):
            for mask in shown:
                self._refuse_if_learned(mask, line)
        programs = [self._program(mask, line) for mask in shown]
        module = getattr(self.module, str(score.target)) if isinstance(score, fx.Node) else None
        self.sites.append(
            Site(
                places[0],
                places[1],
                tuple(programs),
                bool(causal),
                float(scale),
                module,
                line,
                _module(node),
                heads=int(query.meta["val"].shape[1]),
                expansion=None if latents is None else latents.expansion,
                chooser=None if selected is None else self.chosen[selected],
                finite_selection=bool(node.meta["origin"].meta.get("finite_selection")),
            )
        )
        with self.graph.inserting_before(node):
            new = self.graph.call_function(
                ops.attend,
                (
                    self.span,
                    len(self.sites) - 1,
                    query,
                    *kept,
                    tuple(score_inputs),
                    sink,
                    () if latents is None else latents.inputs,
                    selected,
                ),
            )
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        self._replaced(node, new)
        self.graph.erase_node(node)
        if isinstance(score, fx.Node) and not score.users:
            self.graph.erase_node(score)

    def choose(self, node: fx.Node) -> None:
        """Turn one selection of keys into its stateful form."""
        parts: Any = node.args
        queries, keys, others, masks, k, score, query_dims = parts
        line = user_line(node.meta.get("stack_trace"))
        kept = [self._slot(x, line, learns=False) for x in keys]
        places = [list(self.slots).index(x) for x in kept]
        function = restore_autocast(getattr(self.module, str(score.target)))
        sizes = self.step.sizes
        widths = [
            sizes.width(n.meta["val"]) for n in function.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)
        ]
        programs = tuple(self._program(self._mask(m, line), line) for m in masks)
        self.choosers.append(
            Chooser(tuple(places), programs, k, function, query_dims, max(widths), line, _module(node))
        )
        with self.graph.inserting_before(node):
            new = self.graph.call_function(ops.choose, (self.span, len(self.choosers) - 1, queries, keys, others))
        new.meta = dict(node.meta)
        self.chosen[new] = len(self.choosers) - 1
        node.replace_all_uses_with(new)
        self._replaced(node, new)
        self.graph.erase_node(node)
        if not score.users:
            self.graph.erase_node(score)

    def carry(self, node: fx.Node, form: SpanForm) -> None:
        """Give a mixing op the boundary state before the span; keep the one after it."""
        line = user_line(node.meta.get("stack_trace"))
        last = [n for n in self.graph.nodes if n.op == "placeholder"][-1]
        with self.graph.inserting_after(last):
            before = self.graph.placeholder(f"before_{len(self.carries)}")
        before.meta = {"layout": None}
        with self.graph.inserting_before(node):
            both = self.graph.call_function(form.step, (*form.arguments(node), before))
            after = self.graph.call_function(operator.getitem, (both, 1))
            new = both if form.pair else self.graph.call_function(operator.getitem, (both, 0))
        both.meta = after.meta = {**node.meta, "val": None, "layout": None}
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        self._replaced(node, new)
        self.graph.erase_node(node)
        self.carries.append(
            Carry(before.name, form.step.__name__, form.shape, form.dtype, line, _module(node), self._learns(node))
        )
        self.after.append(after)

    def _replaced(self, node: fx.Node, new: fx.Node) -> None:
        self.frontier = tuple(new if n is node else n for n in self.frontier)

    def _mask(self, operand: fx.Node, line: str) -> fx.Node:
        """Return the step's node of an attention's mask."""
        mask = self.mask_of.get(operand)
        if mask is None:
            raise UnsupportedMask(
                "A mask or bias of attention scores is computed from hidden values.",
                where=line,
                remedy="What is added to scores may depend on positions, on inputs and on parameters. Multiply queries "
                "or keys by what depends on them, or add it to the queries and keys before their product.",
            )
        return mask

    def _program(self, mask: fx.Node, line: str) -> int:
        if mask not in self.program_of:
            kinds = self.step.kinds
            try:
                program = mask_rules.block_program(mask, is_light=lambda n: kinds.get(n) in ("light", "size"))
            except mask_rules.NotByBlocks as error:
                raise UnsupportedMask(
                    f"An attention mask can't be computed block by block: {error}.",
                    where=user_line(error.node.meta.get("stack_trace")) or line,
                    remedy="A mask must be elementwise in query and key positions and per-token values.",
                ) from error
            if (program, _finite(mask)) not in self.programs:
                self.programs.append((program, _finite(mask)))
            self.program_of[mask] = self.programs.index((program, _finite(mask)))
        return self.program_of[mask]

    def _refuse_if_learned(self, mask: fx.Node, line: str) -> None:
        """Refuse a mask that a gradient flows through: its blocks are computed outside of autograd."""
        reached = before(mask, self.step.learns)
        names = {i.name: users_expression(i.source) for i in self.step.inputs}
        learned = [names[n.name] for n in reached if n.op == "placeholder"]
        if learned:
            raise UnsupportedMask(
                f"An attention mask or bias is computed from {', '.join(sorted(learned))}, which needs a gradient: "
                "masks are computed a block at a time, without one.",
                where=line,
                remedy="If nothing is to be learned through the mask, take it from a value without a gradient: "
                "`.detach()`, or requires_grad=False. Learned biases need eager.",
            )

    def _state(self, operand: fx.Node, line: str) -> fx.Node:
        """Return the node that is kept for an operand `[rows, heads, tokens, width]`, and make it a slot."""
        return self._slot(self._before_repetition(operand), line)

    def _slot(self, kept: fx.Node, line: str, *, learns: bool = True) -> fx.Node:
        learns = learns and self._learns(kept)
        if kept not in self.slots:
            value = kept.meta["val"]
            self.slots[kept] = Slot(kept.name, int(value.shape[1]), int(value.shape[3]), value.dtype, line, learns)
        elif learns and not self.slots[kept].learns:
            self.slots[kept] = replace(self.slots[kept], learns=True)
        return kept

    def _learns(self, node: fx.Node) -> bool:
        return node.meta["origin"] in self.step.learns

    def _latents(self, key: fx.Node, value: fx.Node) -> Latents | None:
        if (key, value) not in self.latents:
            self.latents[key, value] = find_latents(self.graph, key, value, root=self.module, step=self.step)
        return self.latents[key, value]

    def _before_repetition(self, operand: fx.Node) -> fx.Node:
        """Return the cheapest value `[rows, heads / g, tokens, width]` whose heads the operand repeats g times each."""
        chain = [operand]
        while chain[-1].op == "call_function" and packet(chain[-1].target) in REARRANGES:
            chain.append(chain[-1].args[0])  # type: ignore[arg-type]
        if len(chain) == 1:
            return operand
        values = self._index_values(chain)
        whole = values[operand]
        heads = whole.shape[1]
        for group in sorted((g for g in range(2, heads + 1) if heads % g == 0), reverse=True):
            first = whole[:, ::group]
            if not torch.equal(first.repeat_interleave(group, 1), whole):
                continue
            for node in chain[1:]:
                if values[node].shape == first.shape and torch.equal(values[node], first):
                    return node
            with self.graph.inserting_after(operand):
                new = self.graph.call_function(aten.slice.Tensor, (operand, 1, 0, heads, group))
            layout = operand.meta["layout"]
            new.meta = {**operand.meta, "val": operand.meta["val"][:, ::group]}
            new.meta["layout"] = (layout[0], ((heads // group,) * 2,), *layout[2:])
            return new
        return operand

    def _index_values(self, chain: list[fx.Node]) -> dict[fx.Node, torch.Tensor]:
        """Run a chain of rearranging ops on the positions of its source's elements, for a few rows and tokens."""
        source = chain[-1]
        rows = self.step.sizes.rows
        env: dict[fx.Node, Any] = {self.rows: rows[0] if self.step.sizes.is_static(rows) else 2, self.tokens: 3}

        def run(node: fx.Node) -> Any:
            if node not in env:
                args = map_arg(node.args, run)
                kwargs = map_arg(node.kwargs, run)
                env[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            return env[node]

        shape = []
        for dim in source.meta["layout"]:
            size = 1
            for factor in dim:
                size *= {"Rows": env[self.rows], "Tokens": 3}.get(type(factor).__name__) or factor[0]
            shape.append(size)
        env[source] = torch.arange(torch.Size(shape).numel()).reshape(shape)
        return {node: run(node) for node in chain}

    def finish(self, segment: Segment) -> Stateful:
        """Return the three graphs and the tables."""
        for placeholder in self.mask_of:
            self.graph.erase_node(placeholder)
        state = (*self.slots, *self.after)
        capture, relay = self._graph(state), self._graph((*state, *self.frontier))
        return Stateful(
            segment,
            capture,
            self._graph(self.frontier),
            relay,
            tuple(self.slots.values()),
            tuple(self.carries),
            tuple(self.sites),
            tuple(self.choosers),
            tuple(program for program, _ in self.programs),
            tuple(finite for _, finite in self.programs),
            sum(map(computed_bytes, relay.graph.nodes)),
        )

    def _graph(self, outputs: tuple[fx.Node, ...]) -> fx.GraphModule:
        needed: set[fx.Node] = set()
        stack = list(outputs)
        while stack:
            node = stack.pop()
            if node not in needed:
                needed.add(node)
                stack.extend(node.all_input_nodes)
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            if node.op == "placeholder" or node in needed:
                env[node] = graph.node_copy(node, env.__getitem__)
        graph.output(tuple(env[node] for node in outputs))
        return restore_autocast(fx.GraphModule(self.module, graph))


def _finite(mask: fx.Node) -> bool:
    """Return whether keys that a mask leaves out have a finite score."""
    return bool(mask.meta.get("finite", mask.meta["val"].is_floating_point()))


def _module(node: fx.Node) -> str:
    """Return the path of the user's module that a node of the segment comes from."""
    stack = node.meta["origin"].meta.get("nn_module_stack") if "origin" in node.meta else None
    return users_expression(next(reversed(stack.values()))[0]) if stack else ""


def _placeholders(module: fx.GraphModule, prefix: str) -> list[fx.Node]:
    return [n for n in module.graph.nodes if n.op == "placeholder" and n.name.startswith(prefix)]

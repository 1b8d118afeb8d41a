"""partition: the step as segments (one span of a branch's tokens) and an objective (results to outputs).

In: `Located`. Out: `Partitioned`. Two cuts, both minimal in bytes: between hidden values and the objective (the
*results*), and between the body of a branch and its widest values (the *frontier*, where the head starts that runs in
tiles).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from longstraw import compat
from longstraw.arch.rules import op_name
from longstraw.errors import WideResult, user_line
from longstraw.layout import bytes_per_token, is_dispatched, window
from longstraw.passes.carve import carve, computed_bytes
from longstraw.passes.find_branches import NARROW
from longstraw.passes.find_reads import find_reads
from longstraw.passes.min_cut import min_cut
from longstraw.passes.modes import restore_autocast
from longstraw.stages import Head, Located, Partitioned, Segment


def partition(step: Located) -> Partitioned:
    """Return the step as segments and an objective."""
    graph = step.module.graph
    output = next(iter(reversed(graph.nodes)))
    for node in output.all_input_nodes:
        if step.kinds.get(node) == "region":
            raise _wide(node, "The step returns")
    owners = _owners(step)
    results = _find_results(step, owners)
    for node in results:
        if (
            step.kinds[node] == "region"
            and step.sizes.width(node.meta["val"]) > NARROW
            and not _is_one_token(step, node)
        ):
            raise _wide(node, "The loss is made of")
    segments = []
    for number, (branch, passes) in enumerate(zip(step.branches, step.passes, strict=True)):
        mine = tuple(node for node in results if owners[node] == {number})
        if mine:
            segments.append(_segment(step, branch, mine, passes))
    found = [node for segment in segments for node in segment.results]
    objective = extract(step.module, outputs=output.args[0], stops=found)
    trained = frozenset(x.name for x in step.inputs if x.requires_grad)
    return Partitioned(step, tuple(segments), objective, find_reads(objective, len(found), trained))


def _wide(node: fx.Node, who: str) -> WideResult:
    return WideResult(
        f"{who} {op_name(node)}, hidden values of every token: {_shape(node)}.",
        where=user_line(node.meta.get("stack_trace")),
        remedy="Return per-token numbers (log-probabilities, entropies) or reductions of them. If you did not mean to "
        "return it, Dynamo broke the step here (TORCH_LOGS=graph_breaks shows why), or the model keeps it for its next "
        "call: pass use_cache=False. Compile the function that computes the loss, not the model.",
    )


def _is_one_token(step: Located, node: fx.Node) -> bool:
    seen = window(step.layouts[node])
    return seen is not None and step.sizes.of(seen) == (1, 1)


def _shape(node: fx.Node) -> str:
    return str(tuple(str(size) for size in node.meta["val"].shape)).replace("'", "")


def _owners(step: Located) -> dict[fx.Node, set[int]]:
    """Return for every region and tail node the branches that it depends on."""
    owners: dict[fx.Node, set[int]] = {}
    for number, branch in enumerate(step.branches):
        owners.update({node: {number} for node in branch})
    for node in step.module.graph.nodes:
        if step.kinds.get(node) == "tail":
            owners[node] = set().union(*(owners.get(x, set()) for x in node.all_input_nodes))
    return owners


def _find_results(step: Located, owners: Mapping[fx.Node, set[int]]) -> list[fx.Node]:
    """Return the narrow values at which the objective starts."""
    kinds, layouts = step.kinds, step.layouts

    def stays(node: fx.Node) -> bool:
        """Return whether a segment could compute this node."""
        found, value = layouts.get(node), node.meta.get("val")
        if found and isinstance(value, (tuple, list)):
            found, value = found[0], value[0]
        per_token = isinstance(value, torch.Tensor) and found is not None and window(found) is not None
        return per_token and len(owners[node]) == 1

    values = [
        node
        for node in step.module.graph.nodes
        if kinds.get(node) == "tail"
        or (kinds.get(node) == "region" and any(kinds.get(user) == "tail" for user in node.users))
    ]
    return min_cut(
        values,
        users=lambda node: list(node.users),
        is_source=lambda node: kinds[node] == "region",
        is_sink=lambda node: kinds[node] == "tail" and not stays(node),
        is_end=lambda node: kinds[node] == "tail" and any(user.op == "output" for user in node.users),
        cost=lambda node: _elements(node) if kinds[node] == "tail" or _is_one_token(step, node) else 1 << 50,
    )


def _elements(node: fx.Node) -> int:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 1 << 40
    count = value.element_size()
    for size in value.shape:
        count *= max(1, compat.hint(size))
    return int(count)


def _segment(step: Located, branch: Sequence[fx.Node], results: tuple[fx.Node, ...], passes: int) -> Segment:
    body = _body(step, branch)
    frontier = _find_frontier(step, branch, body, results)
    heads, stops = [], list(frontier)
    groups: dict[Any, list[int]] = {}
    for i, node in enumerate(results):
        seen = window(step.layouts[node])
        assert seen is not None
        groups.setdefault((step.sizes.probe(seen.start), step.sizes.probe(seen.stop)), []).append(i)
    for members in groups.values():
        seen = window(step.layouts[results[members[0]]])
        assert seen is not None
        graph = carve(step, outputs=[results[i] for i in members], stops=stops)
        restore_autocast(graph.module)
        layouts = tuple(step.layouts[results[i]] for i in members)
        heads.append(Head(graph, seen, tuple(members), layouts, sum(map(computed_bytes, graph.module.graph.nodes))))
    return Segment(carve(step, outputs=stops), tuple(stops), tuple(heads), results, passes)


def _body(step: Located, branch: Sequence[fx.Node]) -> set[fx.Node]:
    """Return everything that mixing ops depend on; without any, where hidden values begin."""
    members = set(branch)
    stack = [node for node in branch if step.mixes(node)]
    if not stack:
        return {n for n in branch if not any(x in members for x in n.all_input_nodes)}
    body: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node not in body and node in members:
            body.add(node)
            stack.extend(node.all_input_nodes)
    return body | {n for n in branch if n.target is operator.getitem and n.args[0] in body}


def _find_frontier(
    step: Located, branch: Sequence[fx.Node], body: set[fx.Node], results: tuple[fx.Node, ...]
) -> tuple[fx.Node, ...]:
    """Return the cheapest values between the body and the widest values after it, and what else of the body is read."""
    wanted: set[fx.Node] = set()
    stack = list(results)
    while stack:
        node = stack.pop()
        if node not in wanted:
            wanted.add(node)
            stack.extend(x for x in node.all_input_nodes if step.kinds.get(x) in ("region", "tail"))
    partial = _of_windows(step)
    after = [n for n in step.module.graph.nodes if n in wanted and n not in body and _is_tensor(n)]
    if not after:
        return tuple(n for n in branch if n in wanted and any(u in results or u in wanted for u in n.users))[-1:]
    widest = max(after, key=lambda n: (bytes_per_token(step.layouts[n], n.meta["val"]), -after.index(n)))
    cut = set(
        min_cut(
            [
                n
                for n in step.module.graph.nodes
                if n in wanted and (n not in body or any(u in wanted and u not in body for u in n.users))
            ],
            users=lambda n: [u for u in n.users if u in wanted],
            is_source=lambda n: (
                n in body or not (n in partial or any(step.kinds.get(x) == "region" for x in n.all_input_nodes))
            ),
            is_sink=lambda n: n is widest,
            cost=lambda n: 1 << 40 if n in partial else _cost(n, step.layouts.get(n)),
            near_sink=True,
        )
    )
    reached: set[fx.Node] = set()
    stack, seen = list(results), set[fx.Node]()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in cut or node in body:
            reached.add(node)
        else:
            stack.extend(x for x in node.all_input_nodes if step.kinds.get(x) in ("region", "tail"))
    return tuple(n for n in step.module.graph.nodes if n in reached)


def _of_windows(step: Located) -> set[fx.Node]:
    """Return what is computed from inputs with an entry for each token of a window only: it can't run on others."""
    read = {
        user
        for (user, _), layout in step.demands.items()
        if (seen := window(layout)) is not None and step.sizes.of(seen) != step.sizes.tokens
    }
    found: set[fx.Node] = set()
    for node in step.module.graph.nodes:
        if node in read or any(x in found for x in node.all_input_nodes):
            found.add(node)
    return found


def _cost(node: fx.Node, layout: Any) -> int:
    """Return the bytes per token of a value at which a head may start; entries in the order of experts are no place."""
    if not _is_tensor(node) or layout is None or is_dispatched(layout):
        return 1 << 40
    return bytes_per_token(layout, node.meta["val"])


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def extract(module: fx.GraphModule, *, outputs: Any, stops: Sequence[fx.Node]) -> fx.GraphModule:
    """Return the graph from all inputs, and then `stops` as further inputs, to `outputs` (any structure of nodes)."""
    needed: set[fx.Node] = set()
    stack: list[fx.Node] = []
    map_arg(outputs, stack.append)
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            if node not in stops:
                stack.extend(node.all_input_nodes)
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    nodes = list(module.graph.nodes)
    for node in nodes:
        if node.op == "placeholder":
            env[node] = graph.node_copy(node)
    for i, node in enumerate(stops):
        env[node] = graph.placeholder(f"result_{i}")
        env[node].meta = dict(node.meta)
    for node in nodes:
        if node in needed and node not in env and node.op != "output":
            env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(map_arg(outputs, env.__getitem__))
    return restore_autocast(fx.GraphModule(module, graph))

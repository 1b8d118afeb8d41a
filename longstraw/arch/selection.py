"""Recognises the selection of keys by their scores.

Sparse attention with an indexer (arXiv 2512.02556) scores every pair of a query and an earlier key
with a small indexer, takes the k best keys of each query, and attends to those. As models write it: scores
`[rows, tokens, tokens]`, `topk`, the indices scattered into a mask, masked attention. Here the scores become a function
of per-token values, evaluated block by block, in one `longstraw.ops.select` node; and attention takes its indices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from longstraw import ops
from longstraw.arch.aten import is_pointwise
from longstraw.arch.constants import filled_with
from longstraw.arch.rules import arguments, emit, op_name, packet, tensors
from longstraw.arch.spellings import CASTS, NOT
from longstraw.blocks import UNSEEN
from longstraw.compat import expression

aten = torch.ops.aten


def recognise(module: fx.GraphModule, *, is_score: Callable[[fx.Node], bool]) -> None:
    """Rewrite every selection of keys in a graph in place.

    Args:
        module: an ATen graph without in-place ops.
        is_score: whether a node has two token dims (its last two).
    """
    for node in list(module.graph.nodes):
        if node.op == "call_function" and packet(node.target) is aten.topk and is_score(node.args[0]):
            try:
                _rewrite(module, node)
            except _NotPairsError as error:
                node.meta[REFUSAL] = str(error)  # find_token_dim says so where it meets what can't be run


REFUSAL = "not_a_selection"
"""Under this name a `topk` over pairs of tokens says in its meta why it was not recognised as a selection."""


class _NotPairsError(Exception):
    """The scores are not a function of pairs of tokens that is understood; says what they are."""


def refusal(node: fx.Node) -> str | None:
    """Return why what a node computes is not understood as part of a selection of keys; None when nothing selects."""
    if any(x.target is ops.select for x in node.all_input_nodes):
        return "keys that were selected may only say what an attention sees, as a mask of its own or part of one"
    seen: set[fx.Node] = set()
    stack = [node]
    while stack:
        at = stack.pop()
        if REFUSAL in at.meta:
            return f"its result goes to a topk over keys, and {at.meta[REFUSAL]}"
        stack += [user for user in at.users if user not in seen]
        seen.update(at.users)
    return None


def _rewrite(module: fx.GraphModule, topk: fx.Node) -> None:
    a = arguments(topk)
    scores = a["self"]
    value = scores.meta["val"]
    indices = [user for user in topk.users if user.args[1:] == (1,)]
    k = _most(a["k"], value.shape[-1])
    if a["dim"] % value.ndim != value.ndim - 1 or len(indices) != len(topk.users) or not indices:
        raise _NotPairsError("something else than the indices of the last dim is taken from it")
    if k is None:
        if expression(_val(a["k"])) == expression(value.shape[-1]):
            return  # selects nothing
        raise _NotPairsError("how many keys it takes depends on their number (a constant, or min(constant, number))")
    if not a["largest"]:
        raise _NotPairsError("it takes the lowest scores")
    if value.ndim != 3:
        raise _NotPairsError(f"scores have {value.ndim} dims, not rows, queries and keys")
    graph = module.graph
    with graph.inserting_before(topk):
        scores, masks = _without_masks(graph, scores)
        pairs = _Pairs(graph)
        pairs.finish(pairs.visit(scores, value.ndim - 2, value.ndim - 1))
        name = f"selection_{sum(1 for key in module._modules if key.startswith('selection_'))}"
        module.add_submodule(name, fx.GraphModule({}, pairs.inner))
        function = graph.get_attr(name)
        new = graph.call_function(
            ops.select,
            (
                tuple(pairs.queries),
                tuple(pairs.keys),
                tuple(pairs.others),
                tuple(masks),
                k,
                function,
                tuple(pairs.query_dims),
            ),
            name="select",
        )
    new.meta = {**indices[0].meta, "val": value.new_empty((*value.shape[:2], k), dtype=torch.int64)}
    for index in indices:
        index.replace_all_uses_with(new)
        graph.erase_node(index)
    graph.erase_node(topk)


def _most(k: Any, size: Any) -> int | None:
    """Return how many of `size` entries are taken at most; None when all of them are, or the number is not known."""
    count = expression(_val(k))
    if count.func.__name__ == "Min" and expression(size) in count.args and len(count.args) == 2:
        count = next(x for x in count.args if x != expression(size))
    return int(count) if count.is_Integer else None


def _val(size: Any) -> Any:
    return size.meta["val"] if isinstance(size, fx.Node) else size


def _without_masks(graph: fx.Graph, scores: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """Return the scores without the masks on them, and these as `[rows, 1, tokens, tokens]`."""
    masks: list[fx.Node] = []
    while True:
        name, operands = packet(scores.target), tensors(scores.args)
        if name is aten.masked_fill and is_unseen(arguments(scores)["value"]):
            inside, mask = scores.args[:2]
            if packet(mask.target) in NOT:  # type: ignore[union-attr]
                mask = mask.args[0]  # type: ignore[union-attr]
            else:
                mask = emit(graph, scores, aten.logical_not.default, mask)
        elif name is aten.where and is_unseen(scores.args[2]):
            mask, inside = scores.args[:2]
        elif is_sum(scores) and sum(map(reaches_product, operands)) == 1 and all(map(_has_pairs, operands)):
            inside, mask = sorted(operands, key=lambda x: not reaches_product(x))
        else:
            return scores, masks
        scores = inside  # type: ignore[assignment]
        masks.append(_with_heads(graph, scores, mask))  # type: ignore[arg-type]


def _with_heads(graph: fx.Graph, like: fx.Node, mask: fx.Node) -> fx.Node:
    """Return a mask `[rows, tokens, tokens]` with a dim of heads: that of which it is the one head, if any."""
    if packet(mask.target) is aten.select:
        a = arguments(mask)
        if a["dim"] == 1 and a["self"].meta["val"].ndim == 4 and expression(a["self"].meta["val"].shape[1]) == 1:
            return a["self"]
    return emit(graph, like, aten.unsqueeze.default, with_rank(graph, mask, 3), 1)


def with_rank(graph: fx.Graph, node: fx.Node, rank: int) -> fx.Node:
    """Return a value with dims of size 1 put in front of it, as broadcasting does."""
    while node.meta["val"].ndim < rank:
        node = emit(graph, node, aten.unsqueeze.default, node, 0)
    return node


def is_sum(node: fx.Node) -> bool:
    """Return whether a node adds two tensors as they are."""
    return packet(node.target) is aten.add and len(tensors(node.args)) == 2 and bool(node.kwargs.get("alpha", 1) == 1)


def _has_pairs(node: fx.Node) -> bool:
    """Return whether the last two dims are the tokens of a row, both."""
    shape = node.meta["val"].shape
    return (
        len(shape) > 1 and expression(shape[-1]) == expression(shape[-2]) and bool(expression(shape[-1]).free_symbols)
    )


def reaches_product(node: fx.Node) -> bool:
    """Return whether a value with two token dims comes from a product (scores) and not only from positions (a mask)."""
    seen, stack = set(), [node]
    while stack:
        at = stack.pop()
        if at in seen or at.op != "call_function":
            continue
        seen.add(at)
        if packet(at.target) in (aten.matmul, aten.bmm, aten.baddbmm) and at.meta["val"].is_floating_point():
            return True
        stack.extend(x for x in tensors((at.args, at.kwargs)))
    return False


def is_unseen(value: Any) -> bool:
    """Return whether a value that scores or masks are filled with means "not seen"."""
    number = filled_with(value)
    return number is not None and number <= UNSEEN


# --- scores as a function of pairs ------------------------------------------------------------------------------------


class _Pairs:
    """Copies what lies between per-token values and their scores into a graph `(*queries, *keys, *others) -> scores`.

    A value belongs to the queries or to the keys by which of the scores' token dims reaches it.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph, self.inner = graph, fx.Graph()
        self.queries: list[fx.Node] = []
        self.query_dims: list[int] = []
        self.keys: list[fx.Node] = []
        self.others: list[fx.Node] = []
        self._dims: dict[fx.Node, tuple[int | None, int | None]] = {}
        self._env: dict[fx.Node, fx.Node] = {}
        self._sources: dict[fx.Node, fx.Node] = {}  # kept key-side value -> its inner node
        self._holders: dict[str, list[fx.Node]] = {"query": [], "key": [], "other": []}

    def visit(self, node: fx.Node, query: int | None, key: int | None) -> fx.Node:
        """Return the inner node of a value whose dims `query` and `key` run over queries and keys."""
        if self._dims.setdefault(node, (query, key)) != (query, key):
            raise _NotPairsError("a value stands for queries in one place and for keys in another")
        if node not in self._env:
            if query is None and key is None:
                self.others.append(node)
                self._env[node] = self._holder("other", node)
            elif key is None:
                self.queries.append(node)
                self.query_dims.append(query)  # type: ignore[arg-type]
                self._env[node] = self._holder("query", node)
            elif query is None:
                self._env[node] = self._key(node, key)
            else:
                for operand, *dims in _operand_dims(node, query, key):
                    self.visit(operand, *dims)
                self._env[node] = self.inner.node_copy(node, self._env.__getitem__)
        return self._env[node]

    def _key(self, node: fx.Node, dim: int) -> fx.Node:
        """Follow casts and transposes up to the value that is kept, `[rows, 1, tokens, width]`."""
        chain = []
        at = node
        while (
            packet(at.target) in (*CASTS, aten.transpose, aten.mT, aten.permute, aten.unsqueeze)
            and len(tensors(at.args)) == 1
        ):
            (operand, _, before) = _operand_dims(at, None, dim)[0]
            if before is None:
                break
            chain.append(at)
            at, dim = operand, before
        rank = at.meta["val"].ndim
        if at not in self._sources and rank == 3 and dim == 1:
            self.keys.append(emit(self.graph, at, aten.unsqueeze.default, at, 1))
            self._sources[at] = self.inner.call_function(aten.squeeze.dim, (self._holder("key", at), 1))
        elif at not in self._sources and rank == 4 and dim == 2:
            self.keys.append(at)
            self._sources[at] = self._holder("key", at)
        elif at not in self._sources:
            raise _NotPairsError(f"what it scores keys by has {rank} dims, not rows, tokens and numbers")
        env = {at: self._sources[at]}
        for one in reversed(chain):
            env[one] = self.inner.node_copy(one, env.__getitem__)
        return env[node]

    def _holder(self, kind: str, node: fx.Node) -> fx.Node:
        if not isinstance(node.meta.get("val"), torch.Tensor):
            raise _NotPairsError("a number that is computed has a part in its scores")
        held = self._holders[kind]
        held.append(self.inner.placeholder(f"{kind}_{len(held)}"))
        return held[-1]

    def finish(self, scores: fx.Node) -> None:
        """End the graph, its inputs in order."""
        ordered = fx.Graph()
        env = {old: ordered.placeholder(old.name) for kind in self._holders.values() for old in kind}
        for node in self.inner.nodes:
            if node not in env:
                env[node] = ordered.node_copy(node, env.__getitem__)
        ordered.output(env[scores])
        self.inner = ordered


Dims = tuple[fx.Node, int | None, int | None]


def _operand_dims(node: fx.Node, query: int | None, key: int | None) -> list[Dims]:
    """Return the tensor operands of an op, and which of their dims are the result's dims `query` and `key`."""
    name, rank = packet(node.target), node.meta["val"].ndim if isinstance(node.meta.get("val"), torch.Tensor) else 0
    operands = tensors((node.args, node.kwargs))
    if any(isinstance(x, fx.Node) and x not in operands for x in node.all_input_nodes):
        raise _NotPairsError(f"{op_name(node)} takes a size that varies")

    def all_by(move: Callable[[int, int], int | None]) -> list[Dims]:
        found = []
        for i, x in enumerate(operands):
            dims = [None if d is None else move(i, d) for d in (query, key)]
            shape = x.meta["val"].shape
            dims = [None if d is None or d < 0 or expression(shape[d]) == 1 else d for d in dims]
            found.append((x, *dims))
        return found  # type: ignore[return-value]

    def rank_of(i: int) -> int:
        return int(operands[i].meta["val"].ndim)

    if is_pointwise(node.target) or name in (*CASTS, aten.masked_fill, aten.where):
        return all_by(lambda i, d: d - rank + rank_of(i))
    if name in (aten.matmul, aten.bmm) and min(rank_of(0), rank_of(1)) > 1:
        absent = (rank - 1, rank - 2)  # the left operand has no such dim, nor has the right one the other
        return all_by(lambda i, d: None if d == absent[i] else d - rank + rank_of(i))
    a = arguments(node) if hasattr(node.target, "_schema") else {}
    if name is aten.unsqueeze:
        at = a["dim"] % rank
        return all_by(lambda i, d: None if d == at else d - (d > at))
    if name is aten.squeeze and isinstance(a.get("dim"), int):
        at = a["dim"] % (rank + 1)
        return all_by(lambda i, d: d + (d >= at))
    if name in (aten.mT, aten.t, aten.numpy_T) and (rank == 2 or name is aten.mT):
        last = [rank - 2, rank - 1]
        return all_by(lambda i, d: last[1 - last.index(d)] if d in last else d)
    if name is aten.transpose:
        pair = [a["dim0"] % rank, a["dim1"] % rank]
        return all_by(lambda i, d: pair[1 - pair.index(d)] if d in pair else d)
    if name is aten.permute:
        order = [d % rank for d in a["dims"]]
        return all_by(lambda i, d: order[d])
    if name in (aten.sum, aten.mean, aten.amax) and a.get("dim") not in (None, []):
        before = rank_of(0)
        gone = sorted(d % before for d in ([a["dim"]] if isinstance(a["dim"], int) else a["dim"]))
        kept = list(range(before)) if a["keepdim"] else [d for d in range(before) if d not in gone]
        if any(d in gone for d in (None if d is None else kept[d] for d in (query, key))):
            raise _NotPairsError(f"{op_name(node)} goes over queries or keys before it")
        return all_by(lambda i, d: kept[d])
    raise _NotPairsError(f"{op_name(node)} is not known to keep pairs of queries and keys apart")

"""normalise: one spelling per meaning.

In: `Traced`. Out: `Normalised`, a functional graph in which
- in-place ops became their functional forms, written back through slices;
- grad-mode switches became `detach`, autocast switches became node metadata;
- copies, casts and views that change nothing are gone, and so is dead code;
- a Python float that changes from call to call is a tensor of one number where it meets tensors;
- what is taken from a tensor of one number is a tensor of that number;
- dropout with p = 0 is gone; an active one is refused;
- cross entropy is log-softmax and gather, and so is indexing by counting indices;
- an einsum of queries and keys is a matrix product;
- a loop over rows, or over pieces of tokens, is one computation of all of them;
- a selection of keys is one `longstraw.ops.select` node; attention, in every spelling, one `longstraw.ops.attention`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from longstraw.arch import attention as attention_rule
from longstraw.arch import selection
from longstraw.arch.constants import fill_by_size, filled_with
from longstraw.arch.rules import arguments, emit, packet, tensors
from longstraw.arch.spellings import same_sizes
from longstraw.compat import expression
from longstraw.errors import MixesRows, user_line
from longstraw.passes.changing_numbers import changing_numbers_as_tensors
from longstraw.passes.functional import make_functional
from longstraw.passes.gradients import flow
from longstraw.passes.losses import write_out_losses
from longstraw.passes.modes import resolve_dtypes, resolve_modes
from longstraw.passes.products import write_einsums_as_products
from longstraw.passes.reroll import reroll
from longstraw.passes.trace import copy_graph, drop_unused
from longstraw.stages import Normalised, Traced

aten = torch.ops.aten
_END = 2**62


def normalise(traced: Traced) -> Normalised:
    """Return the step with one spelling per meaning."""
    module = copy_graph(traced.module)
    resolve_dtypes(module.graph)
    _refuse_batch_statistics(module.graph)
    _drop_dropout(module.graph)
    trained = frozenset(i.name for i in traced.inputs if i.requires_grad)
    make_functional(module.graph, trained=trained)
    resolve_modes(module.graph)
    changing_numbers_as_tensors(module.graph)
    _drop_no_ops(module.graph)
    fill_by_size(module.graph)
    _take_tokens_by_slices(module.graph)
    _pad_in_place_of_joining_zeros(module.graph)
    _narrow_before_expanding(module.graph)
    _gather_where_indices_count(module.graph)
    _select_where_masks_write(module.graph)
    write_einsums_as_products(module.graph)
    write_out_losses(module.graph)
    reroll(module.graph)
    drop_unused(module.graph)
    selection.recognise(module, is_score=_two_token_dims(module.graph))
    learns = flow(module.graph, trained=trained)
    attention_rule.recognise(module, is_score=_two_token_dims(module.graph), learns=learns)
    drop_unused(module.graph)
    module.graph.lint()
    module.recompile()
    return Normalised(module, traced.inputs, traced.options)


def _refuse_batch_statistics(graph: fx.Graph) -> None:
    """Refuse batch norm in training mode here: updating its running statistics would be refused as an in-place op."""
    for node in graph.nodes:
        if packet(node.target) is aten.batch_norm and arguments(node)["training"]:
            raise MixesRows(
                "aten.batch_norm mixes rows: in training mode its statistics are taken over all rows and tokens.",
                where=user_line(node.meta.get("stack_trace")),
                remedy="Put it in eval mode, where it uses its running statistics.",
            )


def _drop_dropout(graph: fx.Graph) -> None:
    """Put the operand in place of every dropout that is off, which eager returns itself; refuse an active one."""
    for node in list(graph.nodes):
        if packet(node.target) in (
            aten.dropout,
            aten.dropout_,
            aten.feature_dropout,
            aten.feature_dropout_,
            aten.alpha_dropout,
            aten.alpha_dropout_,
            aten.feature_alpha_dropout,
            aten.feature_alpha_dropout_,
            aten.native_dropout,
        ):
            a = arguments(node)
            if a["p"] and a["train"]:
                raise attention_rule.dropout_error(node, a["p"])
            if packet(node.target) is not aten.native_dropout:
                node.replace_all_uses_with(a["input"] if "input" in a else a["self"])
                graph.erase_node(node)


def _two_token_dims(graph: fx.Graph) -> Any:
    """Return a predicate: do a node's last two dims both have the (symbolic) size of the row?"""

    def check(node: Any) -> bool:
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        if not isinstance(value, torch.Tensor) or value.ndim < 2:
            return False
        a, b = (expression(size) for size in value.shape[-2:])
        return bool(a.free_symbols) and (a == b or bool(b.free_symbols & a.free_symbols))

    return check


# --- no-ops -----------------------------------------------------------------------------------------------------------


_ALIASED_OPS = {
    getattr(aten, alias): getattr(aten, name)
    for alias, name in (
        ("multiply", "mul"),
        ("subtract", "sub"),
        ("divide", "div"),
        ("true_divide", "div"),
        ("negative", "neg"),
        ("absolute", "abs"),
        ("greater", "gt"),
        ("greater_equal", "ge"),
        ("less", "lt"),
        ("less_equal", "le"),
        ("not_equal", "ne"),
        ("concat", "cat"),
        ("concatenate", "cat"),
        ("swapaxes", "transpose"),
        ("swapdims", "transpose"),
        ("special_expit", "sigmoid"),
        ("clip", "clamp"),
        ("broadcast_to", "expand"),
        ("__and__", "bitwise_and"),
        ("__or__", "bitwise_or"),
        ("__xor__", "bitwise_xor"),
    )
}


def _drop_no_ops(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        canonical = _ALIASED_OPS.get(packet(node.target))
        if canonical is not None and hasattr(canonical, node.target._overloadname):
            node.target = getattr(canonical, node.target._overloadname)
        source = _unchanged(node)
        if source is not None:
            node.replace_all_uses_with(source)
            graph.erase_node(node)
        elif packet(node.target) in (aten.view, aten._unsafe_view):
            node.target = aten.reshape.default  # strides may differ without the copies that were dropped


def _unchanged(node: fx.Node) -> fx.Node | None:
    """Return the operand that this node merely repeats, or None."""
    name = packet(node.target)
    if name in (aten.clone, aten.contiguous, aten.alias, aten.lift_fresh_copy, aten.lift_fresh):
        return node.args[0]  # type: ignore[return-value]
    operands = tensors((node.args, node.kwargs))
    if not operands:
        return None
    if name in (aten.cat, aten.concat):
        filled = [x for x in operands if tuple(x.meta["val"].shape) != (0,)]  # cat ignores these, as of an empty cache
        if len(filled) == 1:
            return filled[0]
        if len(filled) < len(operands):
            node.args = (filled, *node.args[1:])
        return None
    before: Any = operands[0].meta["val"]
    after: Any = node.meta.get("val")
    if name in (aten.to, aten._to_copy):
        same = before.dtype == after.dtype and before.device == after.device
        return operands[0] if same else None
    if name is aten.detach:
        return None if before.is_floating_point() or before.is_complex() else operands[0]
    if name is aten.slice:
        a = arguments(node)
        end = a["end"]
        whole = a["start"] in (0, None) and a["step"] == 1 and (end is None or (isinstance(end, int) and end >= _END))
        return operands[0] if whole else None
    if name in (aten.view, aten.reshape, aten._unsafe_view, aten.expand) and before.ndim == after.ndim:
        return operands[0] if same_sizes(before.shape, after.shape) else None
    return None


def _pad_in_place_of_joining_zeros(graph: fx.Graph) -> None:
    """Write `cat([zeros, hidden])`, along a dim whose size is no number, as the padding that it is."""
    for node in list(graph.nodes):
        if packet(node.target) is not aten.cat or not node.meta["val"].dtype.is_floating_point:
            continue
        a = arguments(node)
        parts, d = a["tensors"], a["dim"] % node.meta["val"].ndim
        if len(parts) != 2 or filled_with(parts[0]) != 0 or parts[1].meta["val"].dtype != node.meta["val"].dtype:
            continue
        zeros, size = (expression(part.meta["val"].shape[d]) for part in parts)
        if d == 0 or not zeros.is_Integer or not size.free_symbols:
            continue
        with graph.inserting_before(node):
            amounts = [0, 0] * (node.meta["val"].ndim - 1 - d) + [int(zeros), 0]
            new = graph.call_function(aten.constant_pad_nd.default, (parts[1], amounts))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def _take_tokens_by_slices(graph: fx.Graph) -> None:
    """Write `hidden[:, i]`, where the dim's size is no number (or 1), as a slice of length 1 without its dim."""
    for node in list(graph.nodes):
        if (
            packet(node.target) is not aten.select
            or node.meta["val"].ndim < 2
            or not node.meta["val"].dtype.is_floating_point
        ):
            continue
        a = arguments(node)
        d, at = a["dim"] % a["self"].meta["val"].ndim, a["index"]
        size = expression(a["self"].meta["val"].shape[d])
        if d == 0 or not (size.free_symbols or size == 1):
            continue
        with graph.inserting_before(node):
            end: Any
            if not isinstance(at, fx.Node):
                end = at + 1 if at != -1 else _END
            else:
                end = graph.call_function(operator.add, (at, 1))
                end.meta = {"val": at.meta["val"] + 1}
            one = a["self"] if size == 1 else emit(graph, node, aten.slice.Tensor, a["self"], d, at, end)
            new = emit(graph, node, aten.squeeze.dim, one, d)
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def _narrow_before_expanding(graph: fx.Graph) -> None:
    """Take a part of a dim that was repeated by `expand` out of what was expanded."""
    for node in list(graph.nodes):
        if packet(node.target) is not aten.slice or packet(node.args[0].target) is not aten.expand:
            continue
        source = node.args[0].args[0]
        before, after = source.meta["val"].shape, node.meta["val"].shape
        d = arguments(node)["dim"] % len(after)
        at = d - len(after) + len(before)
        if at < 0 or before[at] != 1 or not isinstance(after[d], int):
            continue
        sizes = list(node.args[0].args[1])
        sizes[d] = after[d]
        if same_sizes(before, after):
            new = source
        else:
            with graph.inserting_before(node):
                new = emit(graph, node, aten.expand.default, source, sizes)
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def _gather_where_indices_count(graph: fx.Graph) -> None:
    """Write `x[arange(rows)[:, None], arange(tokens), chosen]` as a gather along the last dim of the first tokens."""
    for node in list(graph.nodes):
        if packet(node.target) is not aten.index:
            continue
        a = arguments(node)
        x, indices = a["self"], list(a["indices"])
        shape = x.meta["val"].shape
        if len(indices) != len(shape) or len(indices) < 2 or any(index is None for index in indices):
            continue
        *counting, chosen = indices
        sizes = chosen.meta["val"].shape
        if chosen.meta["val"].dtype != torch.int64 or len(sizes) != len(shape) - 1:
            continue
        if not same_sizes(sizes[:1], shape[:1]):  # some of the rows
            continue
        if all(_counts(index, d, sizes) for d, index in enumerate(counting)):
            with graph.inserting_before(node):
                call = functools.partial(emit, graph, node)
                for d, size in enumerate(sizes):
                    if not same_sizes([size], shape[d : d + 1]):
                        x = call(aten.slice.Tensor, x, d, 0, _size(call, chosen, d))
                from_end = call(aten.add.Tensor, chosen, _size(call, x, -1))
                chosen = call(aten.where.self, call(aten.lt.Scalar, chosen, 0), from_end, chosen)
                picked = call(aten.gather.default, x, -1, call(aten.unsqueeze.default, chosen, -1))
                new = call(aten.squeeze.dim, picked, -1)
            node.replace_all_uses_with(new)
            graph.erase_node(node)


def _select_where_masks_write(graph: fx.Graph) -> None:
    """Write `x[mask] = number` as a `where`."""
    for node in list(graph.nodes):
        if packet(node.target) is not aten.index_put:
            continue
        a = arguments(node)
        x, value, indices = a["self"], a["values"], a["indices"]
        given = [d for d, index in enumerate(indices) if index is not None]
        if len(given) != 1 or value.meta["val"].ndim or a["accumulate"]:
            continue
        mask = indices[given[0]]
        if mask.meta["val"].dtype != torch.bool:
            continue
        with graph.inserting_before(node):
            call = functools.partial(emit, graph, node)
            for _ in range(x.meta["val"].ndim - given[0] - mask.meta["val"].ndim):
                mask = call(aten.unsqueeze.default, mask, -1)
            if value.meta["val"].dtype != x.meta["val"].dtype:  # not what where would make of the two
                value = call(aten.to.dtype, value, x.meta["val"].dtype)
            new = call(aten.where.self, mask, value, x)
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def _size(call: Callable[..., fx.Node], node: fx.Node, d: int) -> int | fx.Node:
    size = node.meta["val"].shape[d]
    return size if isinstance(size, int) else call(aten.sym_size.int, node, d)


def _counts(index: fx.Node, d: int, result: Sequence[Any]) -> bool:
    """Return whether an index has the number i wherever dim `d` of a result of such sizes is at i."""
    sizes = index.meta["val"].shape
    at = d - len(result) + len(sizes)
    one_dim = at >= 0 and all(i == at or size == 1 for i, size in enumerate(sizes))
    while packet(index.target) in (aten.unsqueeze, aten.reshape, aten.view):
        index = index.args[0]  # type: ignore[assignment]
    if (
        not one_dim
        or packet(index.target) is not aten.arange
        or not same_sizes(index.meta["val"].shape, result[d : d + 1])
    ):
        return False
    a = arguments(index)
    return a.get("start", 0) in (0, None) and a.get("step", 1) in (1, None)

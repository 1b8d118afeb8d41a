"""normalise: one spelling per meaning.

In: `Traced`. Out: `Normalised`, a functional graph in which
- in-place ops became their functional forms, written back through slices;
- grad-mode switches became `detach`, autocast switches became node metadata;
- copies, casts and views that change nothing are gone, and so is dead code;
- dropout with p = 0 is gone; an active one is refused;
- cross entropy is log-softmax and gather;
- attention, in every spelling, is one `longstraw.ops.attention` node.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from longstraw.arch import attention as attention_rule
from longstraw.arch.rules import arguments, op_name, packet, tensors
from longstraw.compat import expression
from longstraw.errors import MixesRows, UnsupportedOp, user_line
from longstraw.passes.trace import copy_graph
from longstraw.stages import Normalised, Traced

aten = torch.ops.aten
_END = 2**62


def normalise(traced: Traced) -> Normalised:
    """Return the step with one spelling per meaning."""
    module = copy_graph(traced.module)
    _refuse_batch_statistics(module.graph)
    _make_functional(module.graph)
    _resolve_modes(module.graph)
    _drop_no_ops(module.graph)
    _decompose_losses(module.graph)
    _eliminate_dead_code(module.graph)
    attention_rule.recognise(module, is_score=_two_token_dims(module.graph))
    _eliminate_dead_code(module.graph)
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


def _eliminate_dead_code(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users:
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


# --- in-place ops -----------------------------------------------------------------------------------------------------

_BACK = {aten.slice: aten.slice_scatter, aten.select: aten.select_scatter}
_SAME_ORDER = (aten.view, aten.unsqueeze, aten.squeeze)
_ALIASES = (aten.view, aten.alias, aten.detach, aten.unsqueeze, aten.squeeze, aten.transpose, aten.permute, aten.expand)


def _make_functional(graph: fx.Graph) -> None:
    """Replace in-place ops: later uses of the written value see the new one; slices write it back to their base."""
    for node in list(graph.nodes):
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None or not schema.is_mutable:
            continue
        target = node.args[0]
        if schema.arguments[0].alias_info is None or not schema.arguments[0].alias_info.is_write:
            raise _in_place_error(node, "it writes to an argument other than the first")
        if isinstance(target, fx.Node) and target.op == "placeholder":
            raise _in_place_error(node, "it changes one of the step's inputs")
        with graph.inserting_before(node):
            new = _functional_form(graph, node)
        new.meta = {**node.meta, "val": target.meta["val"]}
        node.replace_all_uses_with(new)
        _write_back(graph, node, target, new)
        graph.erase_node(node)


def _functional_form(graph: fx.Graph, node: fx.Node) -> fx.Node:
    name = node.target._schema.name.split("::")[1]  # type: ignore[union-attr]
    target = node.args[0]
    if name == "copy_":
        source = node.args[1]
        dtype = target.meta["val"].dtype  # type: ignore[union-attr]
        if source.meta["val"].dtype != dtype:  # type: ignore[union-attr]
            cast = graph.call_function(aten.to.dtype, (source, dtype))
            cast.meta = {**node.meta, "val": source.meta["val"].to(dtype)}  # type: ignore[union-attr]
            source = cast
        return graph.call_function(aten.expand_as.default, (source, target))
    if name == "zero_":
        return graph.call_function(aten.zeros_like.default, (target,))
    if name == "fill_":
        return graph.call_function(aten.full_like.default, (target, node.args[1]))
    op = getattr(aten, name.rstrip("_"), None)
    overload = getattr(op, node.target._overloadname, None) if op is not None else None  # type: ignore[union-attr]
    if overload is None:
        raise _in_place_error(node, "it has no functional form")
    return graph.call_function(overload, node.args, node.kwargs)


def _write_back(graph: fx.Graph, at: fx.Node, written: Any, new: fx.Node) -> None:
    """Make uses of `written` and of the values it is a view of, after `at`, see the new value."""
    _replace_later(written, new, at)
    while isinstance(written, fx.Node) and packet(written.target) in (*_BACK, *_ALIASES):
        base = written.args[0]
        if not _used_later(base, at, written):
            return
        if packet(written.target) in (aten.alias, aten.detach):
            updated = new
        elif packet(written.target) in _BACK:
            with graph.inserting_before(at):
                scatter = getattr(_BACK[packet(written.target)], "default", None) or _BACK[packet(written.target)].int
                updated = graph.call_function(scatter, (base, new, *written.args[1:]))
            updated.meta = {**at.meta, "val": base.meta["val"]}  # type: ignore[union-attr]
        elif packet(written.target) in _SAME_ORDER:
            with graph.inserting_before(at):
                updated = graph.call_function(aten.view_as.default, (new, base))
            updated.meta = {**at.meta, "val": base.meta["val"]}  # type: ignore[union-attr]
        elif packet(written.target) is aten.transpose:
            with graph.inserting_before(at):
                updated = graph.call_function(aten.transpose.int, (new, *written.args[1:]))
            updated.meta = {**at.meta, "val": base.meta["val"]}  # type: ignore[union-attr]
        else:
            raise _in_place_error(at, f"it writes through {op_name(written)}")
        if isinstance(base, fx.Node) and base.op == "placeholder":
            raise _in_place_error(at, "it changes one of the step's inputs")
        _replace_later(base, updated, at)
        written, new = base, updated


def _used_later(node: Any, at: fx.Node, view: fx.Node) -> bool:
    """Return whether a node (or, through other views, its memory) is read after `at`."""
    if not isinstance(node, fx.Node) or node.op == "placeholder":
        return True
    order = {n: i for i, n in enumerate(at.graph.nodes)}
    others = [user for user in node.users if user is not view]
    if any(order[user] > order[at] or packet(user.target) in (*_BACK, *_ALIASES) for user in others):
        return True
    is_view = packet(node.target) in (*_BACK, *_ALIASES)
    return is_view and _used_later(node.args[0], at, node)


def _replace_later(old: Any, new: fx.Node, at: fx.Node) -> None:
    order = {node: i for i, node in enumerate(at.graph.nodes)}
    for user in list(old.users):
        if user is not new and order[user] > order[at]:
            user.replace_input_with(old, new)


def _in_place_error(node: fx.Node, why: str) -> UnsupportedOp:
    return UnsupportedOp(
        f"The in-place op {op_name(node)} can't be made functional: {why}.",
        where=user_line(node.meta.get("stack_trace")),
        remedy="Write the out-of-place form, e.g. x = torch.where(...) or y = x + 1.",
    )


# --- grad mode and autocast -------------------------------------------------------------------------------------------


def _resolve_modes(graph: fx.Graph) -> None:
    """Turn grad-mode switches into detach, and autocast switches into `meta["autocast"]`."""
    grad = True
    casts: list[tuple[Any, ...]] = []
    frozen: list[fx.Node] = []
    for node in list(graph.nodes):
        target = node.target
        if node.op == "call_function" and target is torch._C._set_grad_enabled:
            grad = bool(node.args[0])
        elif node.op == "call_function" and getattr(target, "__name__", "") == "_enter_autocast":
            device, dtype, enabled = node.args[:3]
            casts.append((device, bool(enabled), dtype or torch.get_autocast_dtype(device)))
        elif node.op == "call_function" and getattr(target, "__name__", "") == "_exit_autocast":
            casts.pop()
        else:
            node.meta["autocast"] = tuple(casts)
            if not grad and node.op == "call_function":
                if _is_its_operand(node):
                    node.replace_all_uses_with(node.args[0])
                else:
                    frozen.append(node)
            continue
        node.replace_all_uses_with(None) if not node.users else None
    for node in reversed(list(graph.nodes)):
        name = getattr(node.target, "__name__", "")
        if node.op == "call_function" and (
            node.target is torch._C._set_grad_enabled or name in ("_enter_autocast", "_exit_autocast")
        ):
            for user in list(node.users):
                graph.erase_node(user)
            graph.erase_node(node)
    inside = set(frozen)
    for node in frozen:
        value = node.meta.get("val")
        outside = [user for user in node.users if user not in inside]
        if not isinstance(value, torch.Tensor) or not outside or not value.is_floating_point():
            continue
        with graph.inserting_after(node):
            cut = graph.call_function(aten.detach.default, (node,))
        cut.meta = dict(node.meta)
        for user in outside:
            user.replace_input_with(node, cut)


def _is_its_operand(node: fx.Node) -> bool:
    """Return whether an op hands back its operand itself, gradient and all: under no_grad, too.

    The trace then takes this node for the operand wherever it is used later, also outside of no_grad.
    """
    name, operands = packet(node.target), tensors(node.args)
    if not operands:
        return False
    before = operands[0].meta["val"]
    if name is aten.to:
        copy = arguments(node).get("copy")
        return not copy and before.dtype == node.meta["val"].dtype and before.device == node.meta["val"].device
    if name is aten.contiguous:
        return bool(before.is_contiguous())
    if name in (aten.dropout, aten.feature_dropout, aten.alpha_dropout):
        return not (arguments(node)["p"] and arguments(node)["train"])
    return False


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
    if name in (aten.dropout, aten.feature_dropout, aten.alpha_dropout, aten.native_dropout):
        a = arguments(node)
        if a["p"] and a["train"]:
            raise attention_rule.dropout_error(node, a["p"])
        return a["input"] if name is not aten.native_dropout else None
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
        return None if before.is_floating_point() else operands[0]
    if name is aten.slice:
        a = arguments(node)
        end = a["end"]
        whole = a["start"] in (0, None) and a["step"] == 1 and (end is None or (isinstance(end, int) and end >= _END))
        return operands[0] if whole else None
    if name in (aten.view, aten.reshape, aten._unsafe_view, aten.expand) and before.ndim == after.ndim:
        same = all(expression(x) == expression(y) for x, y in zip(before.shape, after.shape, strict=True))
        return operands[0] if same else None
    return None


# --- losses -----------------------------------------------------------------------------------------------------------

_MEAN, _SUM = 1, 2


def _decompose_losses(graph: fx.Graph) -> None:
    """Write cross entropy and nll losses as log-softmax, gather, and the reduction."""
    for node in list(graph.nodes):
        name = packet(node.target)
        if node.op != "call_function" or name not in (aten.cross_entropy_loss, aten.nll_loss, aten.nll_loss_nd):
            continue
        a = arguments(node)
        if a["weight"] is not None or a.get("label_smoothing"):
            continue
        with graph.inserting_before(node):
            new = _Emit(graph, node).negative_log_likelihood(
                a["self"], a["target"], int(a["reduction"]), int(a["ignore_index"]), name is aten.cross_entropy_loss
            )
        new.meta = {**node.meta}
        node.replace_all_uses_with(new)
        graph.erase_node(node)


class _Emit:
    """Inserts nodes and computes their fake values."""

    def __init__(self, graph: fx.Graph, like: fx.Node) -> None:
        self.graph, self.like = graph, like

    def __call__(self, op: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(op, args)
        values = fx.node.map_arg(args, lambda n: n.meta["val"])
        node.meta = {**self.like.meta, "val": op(*values)}
        return node

    def negative_log_likelihood(
        self, x: fx.Node, target: fx.Node, reduction: int, ignored: int, logits: bool
    ) -> fx.Node:
        dim = 1 if x.meta["val"].ndim > 1 else 0
        logp = self(aten.log_softmax.int, x, dim) if logits else x
        valid = self(aten.ne.Scalar, target, ignored)
        zero = self(aten.zeros_like.default, target)
        safe = self(aten.where.self, valid, target, zero)
        picked = self(aten.gather.default, logp, dim, self(aten.unsqueeze.default, safe, dim))
        loss = self(aten.neg.default, self(aten.squeeze.dim, picked, dim))
        nothing = self(aten.zeros_like.default, loss)
        loss = self(aten.where.self, valid, loss, nothing)
        if reduction in (_MEAN, _SUM):
            loss = self(aten.sum.default, loss)
        if reduction == _MEAN:
            loss = self(aten.div.Tensor, loss, self(aten.sum.default, valid))
        return loss

"""What a rule answers, and what it may ask.

A *layout rule* is a function `rule(reader, node) -> layout` (a tuple of layouts for an op with several outputs): given
what each operand's dims run over, what do the result's dims run over? It raises, through the reader, when the op would
mix tokens or rows. Tables map an op (an `OpOverloadPacket`, or any callable in the graph) to its rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import fx

from longstraw import compat
from longstraw.arch.same_sizes import SizesApart, Symbols
from longstraw.errors import MixesRows, MixesTokens, UnsupportedOp, user_line
from longstraw.layout import ROWS, Dim, Layout, Probe, Rows, Shuffled, Sizes, Tokens, has, over_pairs, window
from longstraw.scans.opaque import users_names
from longstraw.stages import SpanForm

LayoutRule = Callable[["Reader", fx.Node], Any]


@dataclass(frozen=True)
class Rule:
    """A user's rule for one op or function.

    Attributes:
        target: an `OpOverload`, an `OpOverloadPacket`, or a function that stays one node in the graph.
        layout: its layout rule.
    """

    target: Any
    layout: LayoutRule


def packet(target: Any) -> Any:
    """Return the key under which an op stands in rule tables."""
    return getattr(target, "overloadpacket", target)


def op_name(node: fx.Node) -> str:
    """Return an op's name as a user would look it up."""
    target = packet(node.target)
    if node.op != "call_function":
        return node.op
    if str(target) in users_names:
        return users_names[str(target)]
    return str(target) if hasattr(node.target, "_schema") else str(getattr(target, "__name__", target))


def arguments(node: fx.Node) -> dict[str, Any]:
    """Return a node's arguments by the names of the op's schema, defaults filled in."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        raise TypeError(f"{node.target} has no schema")
    bound: dict[str, Any] = {}
    for i, argument in enumerate(schema.arguments):
        if i < len(node.args):
            bound[argument.name] = node.args[i]
        elif argument.name in node.kwargs:
            bound[argument.name] = node.kwargs[argument.name]
        else:
            bound[argument.name] = argument.default_value if argument.has_default_value() else None
    return bound


def tensors(value: Any) -> list[fx.Node]:
    """Return the nodes with a tensor value in an argument structure, in order."""
    found: list[fx.Node] = []
    fx.node.map_arg(value, lambda n: found.append(n) if isinstance(n.meta.get("val"), torch.Tensor) else None)
    return found


def emit(graph: fx.Graph, like: fx.Node, op: Any, /, *args: Any, **kwargs: Any) -> fx.Node:
    """Insert an op at the graph's insertion point: with the fake value of its result, and `like`'s line and modes."""
    node = graph.call_function(op, args, kwargs)
    fakes, named = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
    with compat.autocast_state(like.meta.get("autocast", ())), compat.fake_mode((fakes, named)):
        node.meta = {**like.meta, "val": op(*fakes, **named)}
    return node


IN_TILES = (
    "The head runs in tiles of tokens anyway, so a loop over chunks of tokens saves nothing: leave it out, and apply "
    "its body to all tokens at once."
)
"""The remedy where the step cuts tokens to compute its loss on a few at a time."""


def no_rule_for(node: fx.Node, what: str, *, remedy: str = "") -> UnsupportedOp:
    """Return the refusal of an op that no rule covers, or not in this use."""
    return UnsupportedOp(
        f"{op_name(node)} can't be run on a span of tokens: {what}.",
        where=user_line(node.meta.get("stack_trace")),
        remedy=remedy
        or "Built-in rules are in longstraw/arch/aten.py; add one with Options(rules=(Rule(op, layout),)).",
    )


class Reader:
    """What a layout rule sees: operands' layouts, sizes, and the ways to refuse.

    Args:
        sizes: compares sizes.
        layouts: layouts found so far.
        is_light: whether a node is computed whole before the segment runs.
        symbols: what is known of the step's shape symbols.

    Attributes:
        marks: values that say where a span's entries stand, or count them (see `arch/places.py`).
        orders: what was sorted to get an order, by the order's name.
    """

    def __init__(
        self,
        sizes: Sizes,
        layouts: dict[fx.Node, Any],
        is_light: Callable[[fx.Node], bool],
        symbols: Symbols | None = None,
    ) -> None:
        self.sizes, self.layouts, self.is_light, self.symbols = sizes, layouts, is_light, symbols or Symbols()
        self.demands: dict[tuple[fx.Node, fx.Node], Layout] = {}
        self.local: set[fx.Node] = set()
        self.scans: dict[fx.Node, SpanForm] = {}
        self.marks: dict[fx.Node, Any] = {}
        self.orders: dict[str, Any] = {}

    def shape(self, node: fx.Node) -> tuple[Probe, ...]:
        """Return a node's probed shape."""
        return self.sizes.shape(node.meta["val"])

    def layout(self, node: fx.Node) -> Layout | None:
        """Return a region operand's layout; None for an operand that the segment doesn't compute."""
        return self.layouts.get(node)

    def operand(self, user: fx.Node, node: fx.Node) -> Layout:
        """Return an operand's layout; a light operand is judged by its sizes and read in that layout."""
        found = self.layouts.get(node)
        if found is not None:
            return found
        shape = self.shape(node)
        if not self.is_light(node):  # parameters and what depends only on them
            return tuple(() if size == (1, 1) else (size,) for size in shape)
        may_be_window = self.sizes.has_window(shape) and not self._is_of_weights(node)
        located = self._in_the_window_of(shape) if may_be_window else None
        if located is None:
            located = self.sizes.locate_shape(shape)
        if located is None:
            located = self._in_the_window_of(shape)
        if located is None:
            for i in range(len(shape)):
                self.refuse_unless_equal(user, node, i)
            self.unsupported(
                user,
                f"its operand {node.name} has a size that is neither rows nor tokens of the step (all passes of one "
                "step have as many rows, of one length)",
            )
        self.read(user, node, located)
        return located

    def _is_of_weights(self, node: fx.Node) -> bool:
        """Return whether a value is made of the model's own tensors alone, which no size of rows or tokens reaches."""
        seen, stack = {node}, [node]
        while stack:
            new = [x for x in stack.pop().all_input_nodes if x not in seen]
            seen.update(new)
            stack += new
        given = [x.meta.get("val") for x in seen if x.op in ("placeholder", "get_attr")]
        static = self.sizes.is_static
        return bool(given) and all(isinstance(v, torch.Tensor) and all(map(static, self.sizes.shape(v))) for v in given)

    def _in_the_window_of(self, shape: tuple[Probe, ...]) -> Layout | None:
        """Return the layout of a light value with an entry for each token of a window, if one window has that size.

        A light value stands at no tokens by itself: whatever hidden values it meets are checked to be of that window.
        """
        found = {
            (self.sizes.probe(w.start), self.sizes.probe(w.stop)): w
            for layout in self.layouts.values()
            for w in [window(layout)]
            if w is not None
        }
        located = [self.sizes.locate_shape(shape, among=w) for w in found.values()]
        fits = [layout for layout in located if layout is not None and window(layout) is not None]
        return fits[0] if len(fits) == 1 else None

    def read(self, user: fx.Node, node: fx.Node, layout: Layout) -> None:
        """Record that `user` reads the light value `node` in this layout."""
        if self.is_light(node):
            self.demands[user, node] = layout

    def align(self, user: fx.Node, node: fx.Node, like: Layout) -> Layout:
        """Return a light operand's layout when it is broadcast against `like` (aligned at the last dim); read it so."""
        shape = self.shape(node)
        like = ((),) * (len(shape) - len(like)) + like
        dims: list[Dim] = []
        for i, (size, dim) in enumerate(zip(shape, like[len(like) - len(shape) :], strict=True)):
            if size == (1, 1):
                dims.append(())
            elif size == self.sizes.of_dim(dim):
                if has(dim, Shuffled):
                    self._other_order(user)
                dims.append(dim)
            else:
                located = self.sizes.locate(size, first=i == 0) if dim == () else None
                if located is None:
                    self.refuse_unless_equal(user, node, i, dim)
                    self.unsupported(user, f"its operand {node.name} doesn't line up with the token dim")
                dims.append(located)
        if not self.is_light(node) and node not in self.layouts and any(has(dim, Rows) for dim in dims):
            self._entry_for_each_row(user, node.name)
        self.read(user, node, tuple(dims))
        return tuple(dims)

    def refuse_unless_equal(self, user: fx.Node, node: fx.Node, i: int, dim: Dim = ()) -> None:
        """Ask for a guard, or refuse, where an operand's size is that of another input than the size it should have.

        Args:
            user: the op.
            node: its operand.
            i: which of its dims.
            dim: what that dim should run over; any of rows and tokens, where it is not known.
        """
        size = compat.expression(node.meta["val"].shape[i])
        seen = {w: None for layout in self.layouts.values() for w in [window(layout)] if w is not None}
        tokens: list[Dim] = [(w,) for w in (self.sizes.full, *seen)]
        rows: list[Dim] = [(ROWS,)]
        both: list[Dim] = [(ROWS, *w) for w in tokens]
        if not dim and (self.sizes.locate(self.shape(node)[i], first=i == 0) or not size.free_symbols):
            return
        asked = [self.sizes.size_of_dim(d) for d in ([dim] if dim else [*rows[i:], *tokens, *rows[:i], *both])]
        others = [x for x in asked if not x.free_symbols or not size.free_symbols <= x.free_symbols]
        if not others:
            return
        refusal = UnsupportedOp(
            f"{op_name(user)} combines values that have sizes of their own: those of {self.symbols.owners(size)}, and "
            f"those of {self.symbols.owners(others[0])}.",
            where=user_line(user.meta.get("stack_trace")),
            remedy="Make one from the other, or cut it to the other's size, as in labels[:, -logits.shape[1] :] (all "
            "passes of one step have as many rows, of one length).",
        )
        for other in others:
            equal = self.symbols.equalities(size, other)
            if equal:
                raise SizesApart(refusal, equal)
        if dim:
            raise refusal

    def merge(self, node: fx.Node, layouts: list[Layout]) -> Layout:
        """Return the layout of operands broadcast against one another; refuse shifted windows."""
        rank = max(len(layout) for layout in layouts)
        out: list[Dim] = [()] * rank
        for layout in layouts:
            for i, dim in enumerate(layout, start=rank - len(layout)):
                if dim == ():
                    continue
                if out[i] == ():
                    out[i] = dim
                elif out[i] != dim:
                    joined = self._join(out[i], dim)
                    if joined is None and self.sizes.of_dim(out[i]) == self.sizes.of_dim(dim) == self.sizes.rows:
                        self._entry_for_each_row(node, "an operand")
                    if joined is None:
                        self._mismatch(node, out[i], dim)
                    out[i] = joined
        for kind, refuse, things in ((Tokens, self.mixes_tokens, "token"), (Rows, self.mixes_rows, "row")):
            if over_pairs(tuple(out), kind) and not any(over_pairs(layout, kind) for layout in layouts):
                refuse(node, f"it combines values of every {things} with those of every other")
        return tuple(out)

    def _join(self, a: Dim, b: Dim) -> Dim | None:
        """Return one spelling of two dims that differ only in how plain sizes are split, or None."""
        if self.sizes.of_dim(a) != self.sizes.of_dim(b):
            return None
        for one, other in ((a, b), (b, a)):
            if not any(has(one, kind) for kind in (Rows, Tokens)):
                if has(other, Shuffled):
                    return None
                # A dim known only by its size takes the meaning of the other one; a constant says nothing of rows, and
                # where one was read whole, nothing of tokens.
                constant = self.sizes.rows if has(other, Rows) else self.sizes.of_dim(other)
                known = has(other, Rows) or has(other, Tokens)
                return None if known and self.sizes.is_static(constant) else other
        plain_a = [f for f in a if not isinstance(f, tuple)]
        plain_b = [f for f in b if not isinstance(f, tuple)]
        same = len(plain_a) == len(plain_b) and all(
            f == g or (isinstance(f, Tokens) and isinstance(g, Tokens) and self.same_window(f, g))
            for f, g in zip(plain_a, plain_b, strict=True)
        )
        return a if same else None

    def same_window(self, a: Tokens, b: Tokens) -> bool:
        """Return whether two windows cover the same tokens."""
        return self.sizes.probe(a.start) == self.sizes.probe(b.start) and self.sizes.probe(a.stop) == self.sizes.probe(
            b.stop
        )

    def _mismatch(self, node: fx.Node, a: Dim, b: Dim) -> NoReturn:
        if has(a, Shuffled) or has(b, Shuffled):
            self._other_order(node)
        if has(a, Tokens) and has(b, Tokens):
            self.mixes_tokens(node, "it combines one token's values with those of a token at another position")
        self.unsupported(node, "two of its operands run over different things in the same dim")

    def _other_order(self, node: fx.Node) -> NoReturn:
        self.mixes_tokens(
            node,
            "it combines values that were put in an order (argsort, sort) with values that were not, or in another one",
            remedy="Index both by the same order, or undo it first.",
        )

    def _entry_for_each_row(self, node: fx.Node, operand: str) -> NoReturn:
        raise UnsupportedOp(
            f"{op_name(node)} reads another entry of {operand} in every row: weights are the same for all rows, and "
            f"the step then has {self.sizes.rows[0]} rows and no other number.",
            where=user_line(node.meta.get("stack_trace")),
            remedy="Pass what differs from row to row to the step as a tensor, which may need gradients.",
        )

    def keep(self, node: fx.Node, dims: Dim, what: str, *, remedy: str = "") -> None:
        """Refuse an op that reduces over, sorts, or otherwise mixes along a dim of tokens or rows."""
        if has(dims, Tokens):
            self.mixes_tokens(node, what, remedy=remedy)
        if has(dims, Rows):
            self.mixes_rows(node, what)

    def mixes_tokens(self, node: fx.Node, what: str, *, remedy: str = "") -> NoReturn:
        """Refuse: the op mixes tokens."""
        raise MixesTokens(
            f"{op_name(node)} mixes tokens: {what}.",
            where=user_line(node.meta.get("stack_trace")),
            remedy=remedy
            or "The ops across tokens whose state is known are attention, causal convolutions, shifts, running "
            "sums and listed recurrences; put one of your own in a function and name it with "
            "Options(rules=(longstraw.Scan(...),)). "
            "If the op does keep tokens apart, say so with a longstraw.Rule.",
        )

    def mixes_rows(self, node: fx.Node, what: str) -> NoReturn:
        """Refuse: the op mixes rows."""
        raise MixesRows(
            f"{op_name(node)} mixes rows: {what}.",
            where=user_line(node.meta.get("stack_trace")),
            remedy="Responses are replayed one at a time, so a row's hidden values must not depend on other rows. "
            "Combine rows after the per-token results (log-probabilities), or keep this out of the compiled step.",
        )

    def unsupported(self, node: fx.Node, what: str, *, cause: Exception | None = None, remedy: str = "") -> NoReturn:
        """Refuse: no rule covers this use of the op."""
        raise no_rule_for(node, what, remedy=remedy) from cause

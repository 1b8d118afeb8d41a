"""Associative scans with a combine function of the user's (`associative_scan`): traced as one library scan.

Dynamo would run the combine function level by level through the halves of the row, and tie the graph to its length. It
is traced once instead, on the first and the last token, beside a mark that `resolve` makes a scan of: the library op
that is registered for that combine function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, library

from longstraw import compat
from longstraw.arch.rules import LayoutRule, Reader, packet
from longstraw.arch.user_scan import Scan
from longstraw.errors import UnsupportedOp, user_line
from longstraw.layout import Rows, Tokens, has
from longstraw.scans.associative import AssociativeScan, unpacked
from longstraw.scans.opaque import NAMESPACE


def traceable(
    combine_fn: Callable[[Any, Any], Any], xs: Any, dim: int, reverse: bool = False, combine_mode: str = "pointwise"
) -> Any:
    """What is traced in place of `associative_scan`; both of its modes compute the same."""
    leaves, spec = compat.tree_flatten(xs)

    def combined(*sides: Tensor) -> list[Any]:
        left, right = (compat.tree_unflatten(list(side), spec) for side in (sides[: len(leaves)], sides[len(leaves) :]))
        return [x.clone() for x in compat.tree_leaves(combine_fn(left, right))]  # an output is no input by another name

    first, last = [x.select(dim, 0) for x in leaves], [x.select(dim, -1) for x in leaves]
    found = torch.ops.higher_order.wrap(combined, *first, *last)
    return compat.tree_unflatten(_MARK(leaves, first, last, list(found), dim, reverse), spec)


def _mark() -> Any:
    def run(
        values: list[Tensor], first: list[Tensor], last: list[Tensor], combined: list[Tensor], dim: int, reverse: bool
    ) -> list[Tensor]:
        raise AssertionError("a mark is resolved before it runs")

    op = library.custom_op(f"{NAMESPACE}::associative_scan_mark", run, mutates_args=())
    op.register_fake(lambda values, *_: [torch.empty_like(x) for x in values])
    op.register_autograd(lambda ctx, *grads: run([], [], [], [], 0, False))
    return getattr(torch.ops, NAMESPACE).associative_scan_mark


_MARK = _mark()


def resolve(gm: fx.GraphModule) -> None:
    """Make library scans of the associative scans that a Dynamo graph has, in place, also in checkpointed regions."""
    for module in [m for m in gm.modules() if isinstance(m, fx.GraphModule)]:
        marks = [node for node in module.graph.nodes if packet(node.target) is _MARK]
        for mark in marks:
            _Resolved(module, mark).run()
        if marks:
            module.graph.eliminate_dead_code()
            module.recompile()


class _Resolved:
    """Puts a scan in the place of one mark."""

    def __init__(self, gm: fx.GraphModule, mark: fx.Node) -> None:
        self.gm, self.graph, self.mark = gm, gm.graph, mark
        given: Any = mark.args
        self.values: list[fx.Node] = given[0]
        self.sides: list[fx.Node] = [*given[1], *given[2]]
        self.combined: list[Any] = given[3]
        self.like: list[Tensor] = [x.meta["example_value"] for x in self.values]
        self.dim: int = given[4] % self.like[0].dim()
        self.reverse: bool = given[5]

    def run(self) -> None:
        """Replace it."""
        if not all(x.is_floating_point() or x.is_complex() for x in self.like):
            self._refuse("it scans values that are neither real nor complex numbers")
        scan, extras = self._scan()
        with self.graph.inserting_before(self.mark):
            values = [self._tokens_second(x) for x in self.values]
            pair = self._call(scan.target, ([*values, *extras], None))
            out = self._call(getitem, (pair, 0))
            for user in list(self.mark.users):
                done = self._as_before(self._value(out, user.args[1]))  # type: ignore[arg-type]
                done.meta = dict(user.meta)
                user.replace_all_uses_with(done)
                self.graph.erase_node(user)
        self.graph.erase_node(self.mark)

    def _call(self, function: Any, args: tuple[Any, ...], **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(function, args, kwargs)
        node.meta = {key: x for key, x in self.mark.meta.items() if key != "example_value"}
        return node

    def _tokens_second(self, x: fx.Node) -> fx.Node:
        moved = self._call(torch.unsqueeze, (x, 0)) if self._is_vector else self._call(torch.movedim, (x, self.dim, 1))
        return self._call(torch.flip, (moved, [1])) if self.reverse else moved

    def _as_before(self, x: fx.Node) -> fx.Node:
        turned = self._call(torch.flip, (x, [1])) if self.reverse else x
        return (
            self._call(torch.squeeze, (turned, 0))
            if self._is_vector
            else self._call(torch.movedim, (turned, 1, self.dim))
        )

    @property
    def _is_vector(self) -> bool:
        return self.like[0].dim() == 1

    @property
    def _packed(self) -> bool:
        return len(self.like) > 1 or self.like[0].is_complex()

    def _value(self, out: fx.Node, index: int) -> fx.Node:
        """Return one of the values that are packed in an output."""
        if not self._packed:
            return out
        shapes = [[n for d, n in enumerate(x.shape) if d not in (self.dim, self._first_dim)] for x in self.like]
        if not all(isinstance(size, int) for shape in shapes for size in shape):
            self._refuse("it scans several values whose sizes beside rows and tokens change from call to call")
        sizes = [
            torch.Size(shape).numel() * (2 if x.is_complex() else 1) for shape, x in zip(shapes, self.like, strict=True)
        ]
        part = self._call(torch.narrow, (out, -1, sum(sizes[:index]), sizes[index]))
        return self._call(unpacked, (part, tuple(shapes[index]), self.like[index].dtype))

    @property
    def _first_dim(self) -> int:
        """The dim that is first once the token dim is second; none for a vector."""
        return -1 if self._is_vector else int(self.dim == 0)

    def _scan(self) -> tuple[Scan, list[fx.Node]]:
        """Return the scan, and what its combine function reads beside the values."""
        outputs: list[Any] = [x for x in self.combined if isinstance(x, fx.Node) and x.target is getitem]
        wraps: set[Any] = {node.args[0] for node in outputs}
        if len(wraps) != 1 or not len(outputs) == len(self.combined) == len(self.like):
            self._refuse("its combine function doesn't return one tensor for every value")
        (wrap,) = wraps
        body = getattr(self.gm, wrap.args[0].target)
        places = {x: i for i, x in enumerate(self.sides)}
        extras: list[fx.Node] = []
        feed: list[int | None] = []
        for hole, given in zip(body.graph.find_nodes(op="placeholder"), wrap.args[1:], strict=True):
            if given in places:
                feed.append(places[given])
            elif not hole.users:
                feed.append(None)
            elif self._is_from_a_side(given):
                self._refuse(
                    f"its combine function reads {given}, an attribute of a value that it is given, which Dynamo takes "
                    "out of the function (say torch.real(x) for x.real, and x.transpose(-1, -2) for x.mT)"
                )
            elif isinstance(given, fx.Node) and isinstance(given.meta["example_value"], Tensor):
                feed.append(len(places) + len(extras))
                extras.append(given)
            else:
                self._refuse("its combine function reads a size or a number that changes from call to call")
        order = [node.args[1] for node in outputs]
        return scan_for(body, feed, order, len(self.like), packed=self._packed), extras

    def _is_from_a_side(self, node: Any) -> bool:
        """Return whether a value is computed from the first or the last entries, outside of the combine function."""
        stack, seen = [node], set()
        while stack:
            at = stack.pop()
            if at in self.sides:
                return True
            if isinstance(at, fx.Node) and at not in seen:
                seen.add(at)
                stack.extend(at.all_input_nodes)
        return False

    def _refuse(self, why: str) -> NoReturn:
        raise UnsupportedOp(
            f"associative_scan can't be run in spans: {why}.",
            where=user_line(self.mark.meta.get("stack_trace")),
            remedy="Write the recurrence as a function of its own and plug in a longstraw.Scan for it.",
        )


@dataclass(frozen=True)
class _Combining(Scan):
    """The scan of one combine function, of so many values."""

    num_values: int = 1

    def _returned(self, inputs: list[Tensor]) -> Tensor | None:
        return None  # its output is made from its values

    def layout(self, reader: Reader, node: fx.Node) -> Any:
        """Its layout rule."""
        beside: Any = node.args[0]
        for x in beside[self.num_values :]:
            if any(has(dim, Tokens) or has(dim, Rows) for dim in reader.operand(node, x)):
                reader.unsupported(node, f"its combine function reads {x.name}, which differs from token to token")
        return super().layout(reader, node)

    def _refuse(self, reader: Reader, node: fx.Node, contradiction: str) -> NoReturn:
        reader.unsupported(
            node,
            "its combine function must be associative, treat rows independently and keep shapes and dtypes "
            f"({contradiction})",
        )


RULES: dict[Any, LayoutRule] = {}
"""The rules of the scans that were made."""

_made: dict[Any, Scan] = {}


def scan_for(body: fx.GraphModule, feed: Sequence[int | None], order: Sequence[Any], num: int, *, packed: bool) -> Scan:
    """Return the scan of a combine function; the same one for the same function.

    Args:
        body: its graph.
        feed: for each placeholder of the graph which input it is given: of the left values, the right ones, the others.
        order: for each value which output of the graph it is.
        num: how many values it combines.
        packed: as in `AssociativeScan`.
    """

    def combine(*inputs: Tensor) -> list[Tensor]:
        found = body(*(None if place is None else inputs[place] for place in feed))
        return [found[i] for i in order]

    stateless = not any(node.op == "get_attr" for node in body.graph.nodes)
    key = (body.code, tuple(feed), tuple(order), num, packed) if stateless else body
    if key not in _made:
        scan = AssociativeScan(combine, num, packed)

        def associative_scan(*inputs: Tensor) -> Tensor:
            return scan.whole(*inputs)

        made = _Combining(associative_scan, step=scan.step, state=scan.state, output=scan.output, num_values=num)
        _made[key] = made
        RULES[packet(made.target)] = made.layout
    return _made[key]

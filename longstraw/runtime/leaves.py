"""Where a span lies, and where the gradients that its backward computes are collected."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from longstraw.runtime.boundary import States
from longstraw.runtime.layouts import Place, put
from longstraw.runtime.state import Store
from longstraw.stages import Stateful

Rows = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """A leaf that stands for a part of a token input in one span's graph."""

    node: fx.Node
    leaf: Tensor
    place: Place
    rows: Rows
    lo: int
    hi: int


@dataclass(frozen=True)
class Where:
    """A span: tokens `lo` to `hi` of `rows`, after the state in `path`.

    Attributes:
        rows: the rows that are run (one of them when they are shared).
        targets: the rows that the results are for.
        path: stores of the tokens before the span, outermost first.
    """

    rows: Rows
    targets: Rows
    lo: int
    hi: int
    path: tuple[Store, ...]

    @property
    def boundary(self) -> States:
        """The boundary states before the span, `[1 or rows, ...]` each."""
        return self.path[-1].boundaries.at(self.lo)

    @property
    def boundary_owner(self) -> Store | None:
        """The store that collects the gradients of those states; None when nothing wants them."""
        first = self.lo == self.path[-1].start
        owner = self.path[-1] if not first else self.path[-2] if len(self.path) > 1 else None
        return owner if owner is not None and owner.tracks_gradients else None

    def boundary_leaves(self, learns: Sequence[bool]) -> States:
        """Return the boundary states before the span as leaves of its autograd graph, those that learn with one."""
        wanted = self.boundary_owner is not None
        return tuple(
            state.detach().requires_grad_(wanted and one) for state, one in zip(self.boundary, learns, strict=True)
        )


def learning_inputs(branch: Stateful, values: Mapping[fx.Node, Any], learns: frozenset[fx.Node]) -> list[fx.Node]:
    """Return what a branch reads that gradients flow from: other parameters keep a gradient of None.

    Beside parameters and inputs these are values that are computed from them once for all spans, such as a mean of an
    input: to the spans' graphs they are leaves, and their gradients flow on when all spans are done.

    Args:
        branch: the branch.
        values: what its inputs are, by node of the step.
        learns: the nodes of the step from which the loss is reached.
    """
    found: dict[fx.Node, None] = {}
    for graph in (branch.segment.body, *(head.graph for head in branch.segment.heads)):
        read = graph.inputs
        for node in (*read.parameters, *read.values, *(t.node for t in read.tokens)):
            value = values[node]
            if isinstance(value, Tensor) and value.requires_grad and node in learns:
                found[node] = None
    return list(found)


class Leaves:
    """Where gradients of parameters and of differentiable inputs accumulate during replay and unwind.

    Args:
        values: parameters and other inputs of the spans' graphs, by node of the step.
        wanted: which of them need a gradient.
        dtype: gradients accumulate in at least this dtype.
        num_rows: rows of the step.
    """

    def __init__(
        self, values: Mapping[fx.Node, Tensor], wanted: Sequence[fx.Node], *, dtype: torch.dtype, num_rows: int
    ) -> None:
        self._values, self._num_rows = values, num_rows
        self._wanted = set(wanted)
        self._sums: dict[fx.Node, Tensor] = {}  # of leaves narrower than they add up in
        self._part_sums: dict[fx.Node, Tensor] = {}  # of what is read a part at a time
        self._leaves: dict[fx.Node, Tensor] = {}
        self._dtype = dtype

    def whole(self, node: fx.Node) -> Tensor:
        """Return the leaf that stands for a parameter, or a value that is read whole, in the spans' graphs."""
        value = self._values[node]
        if node not in self._wanted:
            return value.detach()
        if node not in self._leaves:
            leaf = value.detach().requires_grad_()
            wide = torch.promote_types(value.dtype, self._dtype)
            if wide != value.dtype:
                self._sums[node] = torch.zeros_like(value, dtype=wide)
                leaf.register_post_accumulate_grad_hook(self._drain(node))
            self._leaves[node] = leaf
        return self._leaves[node]

    def _drain(self, node: fx.Node) -> Callable[[Tensor], None]:
        total = self._sums[node]

        def hook(leaf: Tensor) -> None:
            assert leaf.grad is not None
            total.add_(leaf.grad)
            leaf.grad = None

        return hook

    def token_input(self, node: fx.Node, part: Tensor, place: Place, where: Where, lo: int, hi: int) -> Part | None:
        """Return a part of a token input as a leaf, or None when it needs no gradient."""
        if node not in self._wanted:
            return None
        return Part(node, part.detach().requires_grad_(), place, where.rows, lo, hi)

    def collect(self, parts: Sequence[Part]) -> None:
        """Add the gradients of a graph's token inputs to their sums."""
        for part in parts:
            if part.leaf.grad is None:
                continue
            if part.node not in self._part_sums:
                value = self._values[part.node]
                wide = torch.promote_types(value.dtype, self._dtype)
                self._part_sums[part.node] = torch.zeros(value.shape, dtype=wide, device=value.device)
            put(
                self._part_sums[part.node],
                part.leaf.grad,
                part.place,
                num_rows=self._num_rows,
                rows=part.rows,
                part_rows=len(part.rows),
                lo=part.lo,
                hi=part.hi,
                add=True,
            )
            part.leaf.grad = None

    def gradient(self, node: fx.Node) -> Tensor | None:
        """Return the gradient of a parameter or input in its own dtype, or None when nothing reached it."""
        leaf = self._leaves.get(node)
        whole = self._sums.get(node, None if leaf is None else leaf.grad)
        found = [x for x in (whole, self._part_sums.get(node)) if x is not None]
        if not found:
            return None
        return (found[0] if len(found) == 1 else found[0] + found[1]).to(self._values[node].dtype)

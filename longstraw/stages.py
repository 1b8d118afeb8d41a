"""The records that the passes hand on, and the vocabulary of layouts.

A *layout* says, for each dim of a tensor, what it runs over: a tuple of factors, major to minor. A factor is `ROWS`, a
`Tokens` window, `Shuffled` (rows and tokens in an order that the data chose), or a plain size. `()` is a dim of size 1.
So hidden states `[G, S, H]` are `((ROWS,), (Tokens(0, S),), (H,))`, and `x.view(-1, H)` is
`((ROWS, Tokens(0, S)), (H,))`.

Sizes are compared by their values at two fixed points ("probes") of the shape symbols: two ints per size, exact
arithmetic, no symbolic simplification.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from longstraw import ops
from longstraw.blocks import BlockProgram
from longstraw.compat import expression
from longstraw.errors import UnsupportedOp
from longstraw.options import Options

Probe = tuple[int, int]


@dataclass(frozen=True)
class Rows:
    """Runs over the rows (sequences) of the step."""


ROWS = Rows()


@dataclass(frozen=True)
class Tokens:
    """Runs over the tokens `start` to `stop` (row coordinates, may be symbolic) of every row."""

    start: sympy.Expr
    stop: sympy.Expr


@dataclass(frozen=True)
class Shuffled:
    """Runs over the entries of `of` in an order given by data: entries stay independent of one another."""

    order: str
    of: tuple[Any, ...]


@dataclass(frozen=True)
class Counts:
    """A small histogram over shuffled entries; has a meaning only beside values in that order."""

    order: str
    size: Probe


Factor = Rows | Tokens | Shuffled | Counts | Probe
Dim = tuple[Factor, ...]
Layout = tuple[Dim, ...]


def has(dim: Dim, kind: type) -> bool:
    """Return whether a dim runs over `kind` (also below a shuffle)."""
    return any(isinstance(f, kind) or (isinstance(f, Shuffled) and has(f.of, kind)) for f in dim)


def find_dim(layout: Layout, kind: type) -> int | None:
    """Return the index of the one dim that runs over `kind`, or None."""
    return next((i for i, dim in enumerate(layout) if has(dim, kind)), None)


def window(layout: Layout) -> Tokens | None:
    """Return the token window of a layout, or None when it doesn't run over tokens."""
    for dim in layout:
        for factor in _unshuffled(dim):
            if isinstance(factor, Tokens):
                return factor
    return None


def _unshuffled(dim: Dim) -> Iterable[Factor]:
    for factor in dim:
        if isinstance(factor, Shuffled):
            yield from _unshuffled(factor.of)
        else:
            yield factor


class Sizes:
    """Compares sizes that contain shape symbols.

    Args:
        rows: number of rows of the step.
        tokens: number of tokens of a row.
    """

    def __init__(self, rows: Any, tokens: Any) -> None:
        self._points: dict[sympy.Symbol, Probe] = {}
        self._cache: dict[sympy.Expr, Probe] = {}
        self.rows_expr, self.tokens_expr = expression(rows), expression(tokens)
        self.rows, self.tokens = self.probe(rows), self.probe(tokens)
        self.full = Tokens(sympy.Integer(0), self.tokens_expr)

    def probe(self, size: Any) -> Probe:
        """Return a size's values at the two points."""
        if isinstance(size, int):
            return (size, size)
        expr = expression(size)
        if expr not in self._cache:
            for symbol in sorted(expr.free_symbols, key=str):
                if symbol not in self._points:
                    n = len(self._points)
                    self._points[symbol] = (sympy.prime(150 + 7 * n), sympy.prime(300 + 11 * n))
            try:
                values = [int(expr.subs({s: p[i] for s, p in self._points.items()})) for i in (0, 1)]
            except (ZeroDivisionError, TypeError) as error:
                raise UnsupportedOp(
                    f"The size {expr} is not understood.", remedy="Sizes must not depend on data."
                ) from error
            self._cache[expr] = (values[0], values[1])
        return self._cache[expr]

    def shape(self, value: Any) -> tuple[Probe, ...]:
        """Return the probed shape of a (fake) tensor."""
        return tuple(self.probe(size) for size in value.shape)

    def of(self, factor: Factor) -> Probe:
        """Return a factor's size."""
        match factor:
            case Rows():
                return self.rows
            case Tokens(start, stop):
                return self.probe(stop - start)
            case Shuffled(_, of):
                return self.of_dim(of)
            case Counts(_, size):
                return size
        return factor

    def of_dim(self, dim: Dim) -> Probe:
        """Return a dim's size."""
        product = (1, 1)
        for factor in dim:
            a, b = self.of(factor)
            product = (product[0] * a, product[1] * b)
        return product

    def is_static(self, size: Probe) -> bool:
        """Return whether a size is a plain number."""
        return size[0] == size[1]

    def locate(self, size: Probe) -> Dim | None:
        """Return what a dim of this size runs over, judged by size alone; None when the size says nothing."""
        if size == (1, 1):
            return ()
        if self.is_static(size):
            return (size,)
        rows: Dim = () if self.is_static(self.rows) else (ROWS,)
        if rows and size == self.rows:
            return rows
        token_dim = (*rows, self.full)
        for dim in ((self.full,), token_dim):
            base = self.of_dim(dim)
            if all(s % b == 0 for s, b in zip(size, base, strict=True)):
                rest = (size[0] // base[0], size[1] // base[1])
                if self.is_static(rest):
                    return dim if rest == (1, 1) else (*dim, rest)
        return None

    def locate_shape(self, shape: tuple[Probe, ...]) -> Layout | None:
        """Return the layout of a value judged by its sizes alone, or None."""
        dims = [self.locate(size) for size in shape]
        return None if any(dim is None for dim in dims) else tuple(dim for dim in dims if dim is not None)


@dataclass(frozen=True)
class Input:
    """One placeholder of the traced graph.

    Attributes:
        name: the placeholder's name in the graph.
        source: the Python expression of the user's value, such as `L['model'].lm_head.weight`.
        requires_grad: whether eager would give it a gradient.
    """

    name: str
    source: str
    requires_grad: bool


@dataclass(frozen=True)
class Traced:
    """trace: the ATen graph of one step, as the user wrote it."""

    module: fx.GraphModule
    inputs: tuple[Input, ...]
    options: Options


@dataclass(frozen=True)
class Normalised:
    """normalise: one spelling per meaning; attention is one node; no in-place ops, no grad-mode switches."""

    module: fx.GraphModule
    inputs: tuple[Input, ...]
    options: Options


@dataclass(frozen=True)
class Branched:
    """find_branches: the kind of every node, and the hidden values of each pass over the tokens."""

    module: fx.GraphModule
    inputs: tuple[Input, ...]
    options: Options
    sizes: Sizes
    kinds: Mapping[fx.Node, str]
    branches: tuple[tuple[fx.Node, ...], ...]


@dataclass(frozen=True)
class Carried:
    """What a mixing op with boundary state does on a span.

    Attributes:
        step: `(*arguments, state) -> (output, state after)`.
        arguments: `node -> arguments` of the step, of this op in any graph that it is copied to.
        shape: sizes of the state for one row.
        dtype: of the state.
        pair: whether the op itself returns an output and a state, too.
    """

    step: Callable[..., Any]
    arguments: Callable[[fx.Node], tuple[Any, ...]]
    shape: tuple[int, ...]
    dtype: torch.dtype
    pair: bool


@dataclass(frozen=True)
class Located:
    """find_token_dim: the layout of every node of the model region.

    Attributes:
        carries: mixing op with boundary state -> what it carries.
        layouts: node of the region or tail -> its layout (a tuple of layouts for ops with several outputs).
        demands: (node, operand) -> the layout in which the op reads that light operand.
        local: light nodes that count a span's entries (`arange` used as an index), computed anew in the segment.
    """

    module: fx.GraphModule
    inputs: tuple[Input, ...]
    options: Options
    sizes: Sizes
    kinds: Mapping[fx.Node, str]
    branches: tuple[tuple[fx.Node, ...], ...]
    layouts: Mapping[fx.Node, Any]
    demands: Mapping[tuple[fx.Node, fx.Node], Layout]
    local: frozenset[fx.Node]
    carries: Mapping[fx.Node, Carried]

    def mixes(self, node: fx.Node) -> bool:
        """Return whether a node reads other tokens."""
        return node.target is ops.attention or node in self.carries


@dataclass(frozen=True)
class TokenInput:
    """A value of all rows and tokens that the segment reads, a span at a time, in a layout.

    Attributes:
        repeated: how many tokens at its beginning are one value repeated for all rows (their gradients add up anyway).
    """

    node: fx.Node
    layout: Layout
    repeated: sympy.Expr


@dataclass(frozen=True)
class SegmentInputs:
    """What a segment graph's placeholders stand for, in order.

    Attributes:
        parameters: placeholders of the step that need a gradient and don't run over tokens.
        values: other values that don't run over tokens (buffers, frozen weights, sizes).
        tokens: values read a span at a time.
        masks: masks of attention, whole; insert_state replaces them by block programs.
    """

    parameters: tuple[fx.Node, ...]
    values: tuple[fx.Node, ...]
    tokens: tuple[TokenInput, ...]
    masks: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Carved:
    """A graph over a span of tokens, `(rows, tokens, *parameters, *values, *token_inputs, *masks, *hidden)
    -> outputs`.

    `rows` and `tokens` are the numbers that are run at once; every node carries its layout in `meta["layout"]`.
    """

    module: fx.GraphModule
    inputs: SegmentInputs


@dataclass(frozen=True)
class Head:
    """The graph from the frontier to the results of one window, run in tiles of tokens.

    Attributes:
        graph: `(rows, tokens, ..., *frontier) -> results`.
        window: the tokens that have these results.
        results: which of the branch's results it computes.
        bytes_per_token: size of its widest values, for choosing a tile.
    """

    graph: Carved
    window: Tokens
    results: tuple[int, ...]
    bytes_per_token: int


@dataclass(frozen=True)
class Segment:
    """partition: one branch over a span of tokens.

    Attributes:
        body: `(rows, tokens, ...) -> frontier`.
        frontier: nodes of the step at which the heads start.
        heads: one graph for each window of results.
        results: nodes of the step that leave the branch.
    """

    body: Carved
    frontier: tuple[fx.Node, ...]
    heads: tuple[Head, ...]
    results: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Partitioned:
    """partition: the step as segments and an objective.

    Attributes:
        objective: `(*inputs, *results of every segment) -> outputs of the step`.
    """

    step: Located
    segments: tuple[Segment, ...]
    objective: fx.GraphModule


@dataclass(frozen=True)
class Slot:
    """One kind of per-token state: `heads x width` numbers for every token of a row."""

    name: str
    heads: int
    width: int
    dtype: torch.dtype
    line: str

    @property
    def bytes_per_token(self) -> int:
        """Bytes of state per token of a row."""
        return self.heads * self.width * self.dtype.itemsize


@dataclass(frozen=True)
class Carry:
    """One boundary state: numbers of a fixed size that a recurrence or a convolution carries from span to span.

    Attributes:
        kind: the op that carries it.
        shape: sizes for one row.
        module: the path of the module that it belongs to, such as `model.layers.0.mixer`, as far as known.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    line: str
    module: str

    @property
    def numbers(self) -> int:
        """How many numbers it has for a row."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes for a row."""
        return self.numbers * self.dtype.itemsize


@dataclass(frozen=True)
class Site:
    """One attention of the segment.

    Attributes:
        key_slot, value_slot: the state slots that hold its earlier keys and values.
        masks: which of the branch's block programs say what may be seen.
        causal: whether only keys at or before the query are seen, in addition.
        scale: factor on the products of queries and keys.
        score: `(scaled products, *inputs) -> scores`, or None.
        module: the path of its module, as far as known.
    """

    key_slot: int
    value_slot: int
    masks: tuple[int, ...]
    causal: bool
    scale: float
    score: fx.GraphModule | None
    line: str
    module: str


@dataclass(frozen=True)
class Stateful:
    """insert_state: one branch, ready to run span by span.

    Attributes:
        capture: `(span, rows, tokens, ..., *boundary states before) -> (*slots, *boundary states after)`: what later
            tokens need.
        score: `-> frontier`: what the results need.
        relay: `-> (*slots, *boundary states after, *frontier)`.
        masks: block programs.
        finite: for each of them, whether unseen keys have a finite score: a query that sees no key then attends to all
            of them, later ones too.
    """

    segment: Segment
    capture: fx.GraphModule
    score: fx.GraphModule
    relay: fx.GraphModule
    slots: tuple[Slot, ...]
    carries: tuple[Carry, ...]
    sites: tuple[Site, ...]
    masks: tuple[BlockProgram, ...]
    finite: tuple[bool, ...]
    graph_bytes_per_token: int


@dataclass(frozen=True)
class WithState:
    """insert_state: the step with every branch stateful."""

    partitioned: Partitioned
    branches: tuple[Stateful, ...]


@dataclass(frozen=True)
class Runs:
    """What runs a branch's segment graphs (see `Stateful` and `Head`)."""

    capture: Callable[..., Any]
    score: Callable[..., Any]
    relay: Callable[..., Any]
    heads: tuple[Callable[..., Any], ...]


@dataclass(frozen=True)
class Lowered:
    """lower: everything that the run time needs for one compiled step.

    Attributes:
        prologue: `(*inputs) -> light values`, in the order of `light`.
        runs: for each branch, what runs its graphs.
    """

    step: WithState
    prologue: fx.GraphModule
    light: tuple[fx.Node, ...]
    runs: tuple[Runs, ...]

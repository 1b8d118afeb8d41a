"""The records that the passes hand on. The vocabulary of layouts is in `layout.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from longstraw import ops
from longstraw.blocks import BlockProgram
from longstraw.layout import Layout, Sizes, Tokens
from longstraw.options import Options


@dataclass(frozen=True)
class Input:
    """One placeholder of the traced graph.

    Attributes:
        name: the placeholder's name in the graph.
        source: the Python expression of the user's value, such as `L['model'].lm_head.weight`.
        requires_grad: whether eager would give it a gradient.
        written: whether the step writes to it. What it writes is returned after the step's own outputs, in the order of
            these inputs.
    """

    name: str
    source: str
    requires_grad: bool
    written: bool = False


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
    """find_branches: the kind of every node, and the hidden values of each pass over the tokens.

    Attributes:
        passes: for each branch, how many passes of the user's step it stands for: those that compute the same.
        learns: the nodes that gradients flow through, from the step's outputs to what is trained.
    """

    module: fx.GraphModule
    inputs: tuple[Input, ...]
    options: Options
    sizes: Sizes
    kinds: Mapping[fx.Node, str]
    branches: tuple[tuple[fx.Node, ...], ...]
    passes: tuple[int, ...]
    learns: frozenset[fx.Node]


@dataclass(frozen=True)
class SpanForm:
    """What a mixing op with boundary state, a scan, is on a span.

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
        scans: mixing op with boundary state -> what it is on a span.
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
    passes: tuple[int, ...]
    learns: frozenset[fx.Node]
    layouts: Mapping[fx.Node, Any]
    demands: Mapping[tuple[fx.Node, fx.Node], Layout]
    local: frozenset[fx.Node]
    scans: Mapping[fx.Node, SpanForm]

    def mixes(self, node: fx.Node) -> bool:
        """Return whether a node reads other tokens."""
        return node.target in (ops.attention, ops.select) or node in self.scans


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
        values: other values that don't run over tokens (buffers, frozen weights, sizes, numbers computed from inputs).
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
        layouts: those of its results in the step. The graph's own outputs know nothing of a window that was cut off
            last.
        bytes_per_token: size of its widest values, for choosing a tile.
    """

    graph: Carved
    window: Tokens
    results: tuple[int, ...]
    layouts: tuple[Layout, ...]
    bytes_per_token: int


@dataclass(frozen=True)
class Segment:
    """partition: one branch over a span of tokens.

    Attributes:
        body: `(rows, tokens, ...) -> frontier`.
        frontier: nodes of the step at which the heads start.
        heads: one graph for each window of results.
        results: nodes of the step that leave the branch.
        passes: how many passes of the user's step it stands for.
    """

    body: Carved
    frontier: tuple[fx.Node, ...]
    heads: tuple[Head, ...]
    results: tuple[fx.Node, ...]
    passes: int


@dataclass(frozen=True)
class Partitioned:
    """partition: the step as segments and an objective.

    Attributes:
        objective: `(*inputs, *results of every segment) -> outputs of the step`.
        reads: what tells from the inputs which entries of the results the objective reads, see `passes/find_reads.py`;
            None where it reads all.
    """

    step: Located
    segments: tuple[Segment, ...]
    objective: fx.GraphModule
    reads: fx.GraphModule | None


@dataclass(frozen=True)
class Slot:
    """One kind of per-token state: `heads x width` numbers for every token of a row.

    Attributes:
        learns: whether gradients reach it.
    """

    name: str
    heads: int
    width: int
    dtype: torch.dtype
    line: str
    learns: bool = True

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
        learns: whether gradients reach it.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    line: str
    module: str
    learns: bool

    @property
    def numbers(self) -> int:
        """How many numbers it has for a row."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes for a row."""
        return self.numbers * self.dtype.itemsize


@dataclass(frozen=True)
class Expansion:
    """How keys and values are rebuilt from a narrower per-token state, the latents of multi-head latent attention.

    Attributes:
        module: `(rows, tokens, *inputs, latents [rows, 1, tokens, width]) -> (keys, values)`.
        key_heads, key_width, value_heads, value_width: sizes of what it builds.
        linear: whether keys and values are linear in the latents, so that a query can be taken into latent space.
    """

    module: fx.GraphModule
    key_heads: int
    key_width: int
    value_heads: int
    value_width: int
    linear: bool

    def absorbed_below(self, heads: int, width: int) -> int:
        """Return for how many queries of a row attending to latents takes fewer products than building keys.

        Building costs `width * (key_heads * key_width + value_heads * value_width)` products for every key; in latent
        space every pair of a query and a key costs `heads * (2 * width - key_width - value_width)` more.

        Args:
            heads: of the queries.
            width: of the latents.
        """
        more = heads * (2 * width - self.key_width - self.value_width)
        return (self.building(width) // more if more > 0 else 1 << 62) if self.linear else 0

    def building(self, width: int) -> int:
        """Return how many products building the keys and values of one token takes, from latents of a width."""
        return width * (self.key_heads * self.key_width + self.value_heads * self.value_width)


@dataclass(frozen=True)
class Site:
    """One attention of the segment.

    Attributes:
        key_slot, value_slot: the state slots that hold its earlier keys and values (one slot: their latents).
        masks: which of the branch's block programs say what may be seen.
        causal: whether only keys at or before the query are seen, in addition.
        scale: factor on the products of queries and keys.
        score: `(scaled products, *inputs) -> scores`, or None.
        module: the path of its module, as far as known.
        heads: of its queries.
        expansion: what builds keys and values from latents, or None: they are the state themselves.
        chooser: which selection says what its queries see, or None: all that masks let them see.
        finite_selection: whether keys that were not selected have a finite score, as for `Stateful.finite`.
    """

    key_slot: int
    value_slot: int
    masks: tuple[int, ...]
    causal: bool
    scale: float
    score: fx.GraphModule | None
    line: str
    module: str
    heads: int
    expansion: Expansion | None = None
    chooser: int | None = None
    finite_selection: bool = False


@dataclass(frozen=True)
class Chooser:
    """One selection of keys.

    Attributes:
        key_slots: the state slots that hold its key-side values.
        masks: which of the branch's block programs say what may be selected.
        k: how many keys a query selects.
        score: `(*queries, *keys, *others) -> scores [rows, query tokens, key tokens]`.
        query_dims: for each query-side value its token dim.
        numbers_per_pair: of the widest value between operands and scores.
        module: the path of its module, as far as known.
    """

    key_slots: tuple[int, ...]
    masks: tuple[int, ...]
    k: int
    score: fx.GraphModule
    query_dims: tuple[int, ...]
    numbers_per_pair: int
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
    choosers: tuple[Chooser, ...]
    masks: tuple[BlockProgram, ...]
    finite: tuple[bool, ...]
    graph_bytes_per_token: int

    @property
    def state_learns(self) -> bool:
        """Whether gradients reach any of the state: where none do, a token without results has no backward."""
        return any(slot.learns for slot in self.slots) or any(carry.learns for carry in self.carries)


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

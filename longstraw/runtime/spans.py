"""One branch's graphs, run on a span of some rows: the only place that calls them.

`Runner` binds a branch to the inputs of one step. `forward` runs a span without autograd; `record` runs it with
autograd, and `send` sends the gradients of its results and of its state through it, which leaves those of parameters in
the leaves. Graphs run under the autocast that surrounded the step, in backward too; gradients flow outside of it, as
eager's do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from longstraw import compat
from longstraw.runtime.boundary import States
from longstraw.runtime.layouts import Place, put, sum_rows, take
from longstraw.runtime.leaves import Leaves, Part, Where
from longstraw.runtime.mixing import Mixing
from longstraw.runtime.state import Store
from longstraw.runtime.visibility import Visibility
from longstraw.stages import Head, Runs, Segment, SegmentInputs, Stateful

TILE_BYTES = 16 << 20
"""What a tile of a head's tokens may take."""


@dataclass(frozen=True)
class SpanGraph:
    """A span that was run with autograd.

    Attributes:
        where: the span.
        state: the per-token state that it appends, one value for each slot.
        after: the boundary states after it.
        hidden: the frontier.
        before: leaves that stand for the boundary states before it.
        parts: leaves that stand for its token inputs.
    """

    where: Where
    state: States
    after: States
    hidden: States
    before: States
    parts: tuple[Part, ...]


class Runner:
    """A branch with the inputs of one step.

    Args:
        branch: its graphs and tables.
        runs: what runs the graphs.
        values: every light value and parameter, by node of the step. No gradient flows into them from here.
        num_rows: rows of the step.
        row_tokens: tokens of a row.
        place: `layout -> Place` with this step's numbers.
        visibility: what may be seen, if other than what the branch's masks say.
    """

    def __init__(
        self,
        branch: Stateful,
        runs: Runs,
        values: Mapping[fx.Node, Any],
        *,
        num_rows: int,
        row_tokens: int,
        place: Callable[[Any], Place],
        visibility: Visibility | None = None,
    ) -> None:
        self.branch, self.runs, self.num_rows, self.place = branch, runs, num_rows, place
        self.row_tokens = row_tokens
        self._values = values
        self._autocast = compat.current_autocast(next(v for v in values.values() if isinstance(v, Tensor)).device.type)
        segment = branch.segment
        self.windows = [(self.place_window(head).start, self.place_window(head).stop) for head in segment.heads]
        self.visibility = visibility or Visibility(branch, values)

    @property
    def segment(self) -> Segment:
        """The branch's partition."""
        return self.branch.segment

    def place_window(self, head: Head) -> Place:
        """Return the tokens that a head's results cover, as a place."""
        return self.place(((head.window,),))

    # --- running ----------------------------------------------------------------------------------------------------

    def results_overlap(self, lo: int, hi: int) -> bool:
        """Return whether any result belongs to these tokens."""
        return any(max(lo, start) < min(hi, stop) for start, stop in self.windows)

    def forward(
        self, where: Where, results: Sequence[Tensor] | None, *, keep: Store | None, boundary: bool = False
    ) -> States:
        """Run a span without autograd; return the boundary states after it (none when nothing asked for them).

        Args:
            where: the span.
            results: where its results are written; None writes none.
            keep: where its per-token state is appended; None keeps none.
            boundary: whether the boundary states after it are wanted.
        """
        wanted = results is not None and self.results_overlap(where.lo, where.hi)
        stateful = keep is not None or boundary
        if not wanted and not stateful:
            return ()
        graph = self.runs.relay if wanted and stateful else self.runs.score if wanted else self.runs.capture
        with compat.autocast_state(self._autocast):
            outputs = graph(self._mixing(where), *self._arguments(where, None, []), *self._boundary(where, None))
        slots, after, hidden = self._parts_of(outputs, stateful, wanted)
        if keep is not None:
            keep.append(slots)
        if results is not None and wanted:
            self.write_results(where, hidden, results)
        return after

    def write_results(self, where: Where, hidden: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Run the heads of a span without autograd and write its results."""
        for head, lo, hi in self._tiles(where):
            values = self._run_head(head, where, lo, hi, hidden, None, [])
            for index, value in zip(head.results, values, strict=True):
                self._put_result(results[index], value, index, where, lo, hi)

    def record(self, where: Where, leaves: Leaves, *, appends: bool) -> SpanGraph:
        """Run a span with autograd; return what `send` starts from.

        Args:
            where: the span, with `path` restored to the tokens before it.
            leaves: what stands for parameters, and where their gradients go.
            appends: whether later tokens read its state.
        """
        wanted = self.results_overlap(where.lo, where.hi)
        if not wanted and not appends:
            return SpanGraph(where, (), (), (), (), ())
        parts: list[Part] = []
        with torch.enable_grad(), compat.autocast_state(self._autocast):
            before = where.boundary_leaves([carry.learns for carry in self.branch.carries])
            arguments = self._arguments(where, leaves, parts)
            graph = self.runs.relay if wanted and appends else self.runs.score if wanted else self.runs.capture
            outputs = graph(self._mixing(where), *arguments, *self._boundary(where, before))
        slots, after, hidden = self._parts_of(outputs, appends, wanted)
        return SpanGraph(where, slots, after, hidden, before, tuple(parts))

    def send(
        self,
        graph: SpanGraph,
        result_grads: Sequence[Tensor | None],
        leaves: Leaves,
        *,
        state_grads: Sequence[Tensor | None],
        boundary_grads: Sequence[Tensor | None],
    ) -> list[Tensor | None]:
        """Send gradients through a recorded span, once; return those of the boundary states before it.

        Args:
            graph: the span.
            result_grads: gradients of all results, whole; None for results without one.
            leaves: those that the span was recorded with.
            state_grads: gradients of the state that the span appends, one for each slot; empty when nothing reads it.
            boundary_grads: gradients of the boundary states after it, or empty.
        """
        pairs: list[tuple[Tensor, Tensor | None]] = []
        if state_grads:
            pairs += zip(graph.state, state_grads, strict=True)
        if boundary_grads:
            pairs += zip(graph.after, boundary_grads, strict=True)
        if graph.hidden:
            found = self._head_gradients(graph.where, graph.hidden, result_grads, leaves)
            pairs += zip(graph.hidden, found, strict=True)
        known = [(out, grad.to(out.dtype)) for out, grad in pairs if grad is not None and out.requires_grad]
        if known:
            torch.autograd.backward([out for out, _ in known], [grad for _, grad in known])
        leaves.collect(graph.parts)
        return [leaf.grad for leaf in graph.before]

    def _parts_of(self, outputs: Sequence[Tensor], stateful: bool, wanted: bool) -> tuple[States, States, States]:
        """Return a graph's outputs as slots, boundary states and frontier."""
        slots = len(self.branch.slots) if stateful else 0
        carried = len(self.branch.carries) if stateful else 0
        hidden = tuple(outputs[slots + carried :]) if wanted else ()
        return tuple(outputs[:slots]), tuple(outputs[slots : slots + carried]), hidden

    def _mixing(self, where: Where) -> Mixing:
        return Mixing(self.branch, self.visibility.blocks(where.rows), where, self.row_tokens)

    def _boundary(self, where: Where, leaves: Sequence[Tensor] | None) -> list[Tensor]:
        """Return the boundary states before a span, for each of its rows."""
        states = where.boundary if leaves is None else leaves
        return [state.expand(len(where.rows), *state.shape[1:]) for state in states]

    def _head_gradients(
        self, where: Where, hidden: Sequence[Tensor], result_grads: Sequence[Tensor | None], leaves: Leaves
    ) -> list[Tensor]:
        """Run the heads forward and backward, tile by tile; return the gradients of the frontier."""
        total = [torch.zeros_like(h) for h in hidden]
        cut = [h.detach().requires_grad_(h.is_floating_point()) for h in hidden]
        for head, lo, hi in self._tiles(where):
            grads = [self._take_grad(result_grads[index], index, where, lo, hi) for index in head.results]
            parts: list[Part] = []
            with torch.enable_grad():
                values = self._run_head(head, where, lo, hi, cut, leaves, parts)
            pairs = [
                (v, g.to(v.dtype)) for v, g in zip(values, grads, strict=True) if g is not None and v.requires_grad
            ]
            if pairs:
                torch.autograd.backward([v for v, _ in pairs], [g for _, g in pairs])
            leaves.collect(parts)
            for sum_, leaf in zip(total, cut, strict=True):
                if leaf.grad is not None:
                    sum_ += leaf.grad
                    leaf.grad = None
        return total

    def _tiles(self, where: Where) -> Iterator[tuple[Head, int, int]]:
        for head, (start, stop) in zip(self.segment.heads, self.windows, strict=True):
            lo, hi = max(where.lo, start), min(where.hi, stop)
            size = max(1, TILE_BYTES // max(1, head.bytes_per_token * len(where.rows)))
            for at in range(lo, hi, size):
                yield head, at, min(at + size, hi)

    def _run_head(
        self,
        head: Head,
        where: Where,
        lo: int,
        hi: int,
        hidden: Sequence[Tensor],
        leaves: Leaves | None,
        parts: list[Part],
    ) -> tuple[Tensor, ...]:
        count = len(where.rows)
        cut = [
            take(
                value,
                self.place(self._frontier_layout(i)),
                num_rows=count,
                rows=None,
                covers=(where.lo, where.hi),
                lo=lo,
                hi=hi,
            )
            for i, value in enumerate(hidden)
        ]
        inputs = self._inputs(head.graph.inputs, where, lo, hi, leaves, parts)
        run = self.runs.heads[self.segment.heads.index(head)]
        with compat.autocast_state(self._autocast):
            return run(count, hi - lo, *inputs, *cut)

    def _frontier_layout(self, index: int) -> Any:
        head = self.segment.heads[0].graph.module
        return [n for n in head.graph.nodes if n.op == "placeholder" and n.name.startswith("hidden_")][index].meta[
            "layout"
        ]

    def _arguments(self, where: Where, leaves: Leaves | None, parts: list[Part]) -> list[Any]:
        inputs = self._inputs(self.segment.body.inputs, where, where.lo, where.hi, leaves, parts)
        return [len(where.rows), where.hi - where.lo, *inputs]

    def _inputs(
        self, inputs: SegmentInputs, where: Where, lo: int, hi: int, leaves: Leaves | None, parts: list[Part]
    ) -> list[Any]:
        """Return what a graph reads; leaves of token inputs are added to `parts`."""
        whole = [self._whole(node, leaves) for node in (*inputs.parameters, *inputs.values)]
        tokens = []
        for wanted in inputs.tokens:
            place = self.place(wanted.layout)
            value = take(
                self._values[wanted.node].detach(),
                place,
                num_rows=self.num_rows,
                rows=where.rows,
                covers=(place.start, place.stop),
                lo=lo,
                hi=hi,
            )
            part = None if leaves is None else leaves.token_input(wanted.node, value, place, where, lo, hi)
            if part is not None:
                parts.append(part)
            tokens.append(value if part is None else part.leaf)
        return [*whole, *tokens]

    def _whole(self, node: fx.Node, leaves: Leaves | None) -> Any:
        """Return something that is read whole: its leaf in a graph, or its value."""
        value = self._values[node]
        if not isinstance(value, Tensor):
            return value
        return value.detach() if leaves is None else leaves.whole(node)

    # --- results ----------------------------------------------------------------------------------------------------

    def result_place(self, index: int) -> Place:
        """Return the layout of a result."""
        head = next(h for h in self.segment.heads if index in h.results)
        return self.place(head.layouts[head.results.index(index)])

    def empty_result(self, index: int) -> Tensor:
        """Return zeros for a result of all rows and of the tokens that have it."""
        node, place = self.segment.results[index], self.result_place(index)
        sizes = {-1: self.num_rows, -2: place.stop - place.start}
        apart = torch.empty([sizes.get(size, size) for size in place.shape], device="meta")
        device = next(v.device for v in self._values.values() if isinstance(v, Tensor))
        return torch.zeros(place.joined(apart).shape, dtype=node.meta["val"].dtype, device=device)

    def _put_result(self, whole: Tensor, part: Tensor, index: int, where: Where, lo: int, hi: int) -> None:
        place = self.result_place(index)
        put(
            whole,
            part,
            place,
            num_rows=self.num_rows,
            rows=where.targets,
            part_rows=len(where.rows),
            lo=lo,
            hi=hi,
        )

    def _take_grad(self, whole: Tensor | None, index: int, where: Where, lo: int, hi: int) -> Tensor | None:
        if whole is None:
            return None
        place = self.result_place(index)
        part = take(
            whole, place, num_rows=self.num_rows, rows=where.targets, covers=(place.start, place.stop), lo=lo, hi=hi
        )
        if len(where.rows) == len(where.targets):
            return part
        return sum_rows(part, place, len(where.targets), hi - lo)

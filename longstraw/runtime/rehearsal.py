"""What running spans takes, found by running them on fake tensors: the run time's own code, without data or memory.

A span is recorded and sent as replay and unwind do it, after as many earlier tokens as attention reads at once, and
the bytes of live tensors are counted. Masks are taken for causal ones: what a window hides is not less to run.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from longstraw.options import Options
from longstraw.runtime.attention import KEY_TILE
from longstraw.runtime.blocks import Blocks, CausalBlocks
from longstraw.runtime.leaves import Leaves, Rows, Where, learning_inputs
from longstraw.runtime.live_bytes import LiveBytes
from longstraw.runtime.numbers import Numbers
from longstraw.runtime.spans import Runner
from longstraw.runtime.state import Store, merged
from longstraw.runtime.tiers import Tier
from longstraw.runtime.visibility import Visibility
from longstraw.stages import Runs, Stateful


@dataclass(frozen=True)
class Footprint:
    """What one span takes, in bytes, without state and without gradients of parameters.

    Attributes:
        captured: at most, run without autograd.
        held: by its graph, between `record` and `send`.
        peak: at most, from `record` to the end of `send`.
    """

    captured: int
    held: int
    peak: int


_EARLIER = 4 * KEY_TILE
"""Tokens before a rehearsed span: more than attention and selection have on the device at once."""


class _Causal(Visibility):
    """Every token sees all before it, whatever the masks say."""

    def __init__(self, branch: Stateful, values: Mapping[fx.Node, Any], device: torch.device) -> None:
        super().__init__(branch, values)
        self._all: list[Blocks] = [CausalBlocks(device=device)] * (len(branch.sites) + len(branch.choosers))

    def blocks(self, rows: Rows) -> list[Blocks]:
        """Return what each attention and each selection may see."""
        return self._all


class Rehearsal:
    """Runs spans of one branch on fake tensors.

    Args:
        branch: the compiled branch.
        values: every input and light value as fake tensors of `mode`, by node of the step.
        numbers: the step's sizes.
        learns: what gradients flow from.
        options: the user's.
        mode: the fake tensor mode.
    """

    def __init__(
        self,
        branch: Stateful,
        values: Mapping[fx.Node, Any],
        numbers: Numbers,
        *,
        learns: frozenset[fx.Node],
        options: Options,
        mode: Any,
    ) -> None:
        self._branch, self._mode, self._options = branch, mode, options
        self._device = next(v.device for v in values.values() if isinstance(v, Tensor))
        self._runner = Runner(
            branch,
            Runs(branch.capture, branch.score, branch.relay, tuple(h.graph.module for h in branch.segment.heads)),
            values,
            num_rows=numbers.rows,
            row_tokens=numbers.tokens,
            place=functools.lru_cache(maxsize=None)(numbers.place),
            visibility=_Causal(branch, values, self._device),
        )
        wanted = learning_inputs(branch, values, learns)
        self._leaves = Leaves(values, wanted, dtype=options.grad_dtype, num_rows=numbers.rows)
        self._seen: set[tuple[bool, bool]] = set()

    @property
    def rows(self) -> int:
        """Rows of the step."""
        return self._runner.num_rows

    @property
    def response(self) -> tuple[int, int]:
        """The first and the last token + 1 of a response: what has results, but for the prompt's last token."""
        stop = max(stop for _, stop in self._runner.windows)
        first = min(start for start, _ in self._runner.windows)
        return (first if first > 0 else max(1, stop // 2)), stop

    def span(self, *, rows: int, lo: int, hi: int, appends: bool) -> Footprint:
        """Return what a span takes.

        Args:
            rows: that run side by side; the first of the step's.
            lo, hi: its tokens.
            appends: whether later tokens read its state.
        """
        key = (appends, self._runner.results_overlap(lo, hi))
        if key not in self._seen:  # gradients of parameters aren't the span's: let them be there
            self._seen.add(key)
            self.span(rows=1, lo=hi - 1, hi=hi, appends=appends)
        with self._mode, LiveBytes(tolerance=0.005) as live:
            return self._count(live, tuple(range(rows)), lo, hi, appends)

    def _count(self, live: LiveBytes, rows: tuple[int, ...], lo: int, hi: int, appends: bool) -> Footprint:
        runner, where = self._runner, Where(rows, rows, lo, hi, (self._earlier(lo),))
        results = [runner.empty_result(i) for i in range(len(self._branch.segment.results))]
        live.restart()
        before = live.now()
        with torch.no_grad():
            runner.forward(where, results, keep=None, boundary=appends)
        captured = live.peak - before
        live.restart()
        graph = runner.record(where, self._leaves, appends=appends)
        held = live.now() - before
        grads = [r if r.is_floating_point() else None for r in results]
        learns = [slot.learns for slot in self._branch.slots]
        zeros = [torch.zeros_like(x) if wanted else None for x, wanted in zip(graph.state, learns, strict=False)]
        runner.send(
            graph,
            grads,
            self._leaves,
            state_grads=zeros if appends else (),
            boundary_grads=[torch.zeros_like(x) for x in graph.after],
        )
        return Footprint(captured, held, live.peak - before)

    def _earlier(self, lo: int) -> Store:
        """Return state of the tokens before a span."""
        start = max(0, lo - _EARLIER)
        kept = merged([(start, lo)])
        boundary = [torch.zeros((1, *c.shape), dtype=c.dtype, device=self._device) for c in self._branch.carries]
        store = Store(
            self._branch.slots,
            [kept] * len(self._branch.slots),
            owner="a rehearsal",
            rows=1,
            start=start,
            stop=lo,
            tier=Tier("device", self._device),
            boundary=boundary,
        )
        if lo > start:
            shapes = [(1, slot.heads, lo - start, slot.width) for slot in self._branch.slots]
            store.append(
                [
                    torch.empty(s, dtype=t.dtype, device=self._device)
                    for s, t in zip(shapes, self._branch.slots, strict=True)
                ]
            )
            store.track_gradients(self._options.grad_dtype)
        store.boundaries.save(lo, boundary, keep=True)
        return store

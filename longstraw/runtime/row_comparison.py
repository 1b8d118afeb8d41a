"""How many tokens rows have in common, judged by all that the model reads of them: ids, positions, masks, labels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from longstraw.blocks import BlockProgram, Count, Read, Side
from longstraw.runtime.layouts import Place
from longstraw.runtime.numbers import Numbers
from longstraw.stages import Stateful, TokenInput

_TILE = 1 << 22
"""How many numbers are compared at once."""


@dataclass(frozen=True)
class _Read:
    """Something that the model reads of every row.

    Attributes:
        value: `[rows, tokens, ...]`, or `[rows, numbers]` without tokens, as bits.
        start: its first token, or the first token for which it is read.
        by_token: whether it has tokens.
    """

    value: Tensor
    start: int
    by_token: bool

    def in_common(self, row: int, rows: Tensor, since: int, stop: int) -> Tensor:
        """Return for each row how many tokens it has in common with one row, `stop` where nothing differs."""
        if not self.by_token:
            equal = (self.value[rows] == self.value[row]).flatten(1).all(-1)
            return torch.where(equal, stop, self.start).cpu()
        at, end = max(0, since - self.start), self.value.shape[1]
        size = max(1, _TILE // max(1, len(rows) * self.value[0, :1].numel()))
        found = torch.full((len(rows),), stop, device=self.value.device)
        while at < end:
            part = self.value[:, at : at + size]
            different = part[rows] != part[row]
            different = different.flatten(2).any(-1) if different.ndim > 2 else different
            first = torch.where(different.any(-1), self.start + at + different.byte().argmax(-1), stop)
            found = torch.minimum(found, first)
            at += size
            if at < end and not bool((found == stop).any()):
                break
        return found.cpu()


class RowComparison:
    """Compares the rows of one step.

    Args:
        branch: the compiled branch.
        values: every input and light value, by node of the step.
        numbers: this step's sizes.
        place: `layout -> Place` with them.
        stop: end of the tokens that are run.
        differentiable: inputs that get a gradient.
    """

    def __init__(
        self,
        branch: Stateful,
        values: Mapping[fx.Node, Any],
        numbers: Numbers,
        place: Callable[[Any], Place],
        *,
        stop: int,
        differentiable: Sequence[fx.Node],
    ) -> None:
        self._branch, self._values, self._numbers, self._place = branch, values, numbers, place
        self._stop, self._differentiable = stop, differentiable

    def common(self, row: int, rows: Sequence[int], since: int) -> list[int]:
        """Return how many tokens from the beginning each row has in common with one row, in everything it reads.

        Args:
            row: one row.
            rows: what is compared with it.
            since: they are known to have so many in common.
        """
        if list(rows) == [row]:
            return [self._stop]
        lengths = torch.full((len(rows),), self._stop)
        for read in self._read:
            index = torch.tensor(rows, device=read.value.device)
            lengths = torch.minimum(lengths, read.in_common(row, index, since, self._stop))
        if torch.is_grad_enabled():
            # A value given for every row gets a gradient for every row, so rows can't share it.
            own = min([self._stop, *map(self._shareable, self._own)])
            lengths = torch.where(torch.tensor(rows) == row, lengths, lengths.clamp(max=own))
        found: list[int] = lengths.tolist()
        return found

    def _shareable(self, own: TokenInput) -> int:
        """Return the first token at which rows have a gradient of their own."""
        place = self._place(own.layout)
        return 0 if place.token_dim is None else max(0, place.start + self._numbers(own.repeated))

    @functools.cached_property
    def _own(self) -> list[TokenInput]:
        """Return what has a gradient for every row."""
        return [t for t in self._token_inputs if t.node in self._differentiable]

    @functools.cached_property
    def _token_inputs(self) -> list[TokenInput]:
        graphs = (self._branch.segment.body, *(head.graph for head in self._branch.segment.heads))
        return [t for graph in graphs for t in graph.inputs.tokens]

    @functools.cached_property
    def _read(self) -> list[_Read]:
        """Return all that may differ between rows."""
        layouts: dict[tuple[fx.Node, Place, int], None] = {}
        segment = self._branch.segment
        for graph, first in ((segment.body, 0), *((h.graph, self._place(((h.window,),)).start) for h in segment.heads)):
            for t in graph.inputs.tokens:
                own = self._place(t.layout)
                layouts[t.node, own, first if own.token_dim is None else 0] = None
        found: list[_Read] = []
        for program in self._branch.masks:
            if any(isinstance(step, Count) and step.cut.side is Side.ROW for step in program.steps):
                found.append(_Read(torch.arange(self._numbers.rows)[:, None], 0, by_token=False))
            for node, dim in _read_by_row(program):
                located = self._numbers.sizes.locate_shape(self._numbers.sizes.shape(node.meta["val"]))
                place = None if located is None else self._place(located)
                if place is not None and place.row_dim == dim:
                    layouts[node, place, 0] = None
                else:  # tokens unknown: rows are equal as a whole or not at all
                    rows = self._values[node].movedim(dim, 0).reshape(self._numbers.rows, -1)
                    found.append(_Read(_bits(rows), 0, by_token=False))
        for node, place, first in layouts:
            value = self._values[node]
            if place.row_dim is None or not isinstance(value, Tensor):
                continue
            parts = place.apart(value.detach(), self._numbers.rows, place.stop - place.start)
            if place.token_dim is None:
                rows = parts.movedim(place.row_dim, 0).reshape(self._numbers.rows, -1)
                found.append(_Read(_bits(rows), first, by_token=False))
            else:
                moved = parts.movedim((place.row_dim, place.token_dim), (0, 1))
                found.append(_Read(_bits(moved), place.start, by_token=True))
        return found


def _read_by_row(program: BlockProgram) -> dict[tuple[fx.Node, int], None]:
    """Return of which inputs, along which of their dims, a mask's program reads for each row another part."""
    return {
        (program.inputs[read.input], dim): None
        for read in program.steps
        if isinstance(read, Read)
        for dim, cut in enumerate(read.cuts)
        if cut is not None and cut.side is Side.ROW
    }


def _bits(value: Tensor) -> Tensor:
    """Return numbers as they are stored: 0.0 and -0.0 differ, and a NaN is equal to itself."""
    real = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    return real.view(_INTEGERS[real.element_size()]) if real.is_floating_point() else real


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

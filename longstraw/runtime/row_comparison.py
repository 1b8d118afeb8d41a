"""How many tokens rows have in common, judged by all that the model reads of them: ids, positions, masks, labels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from longstraw.runtime.layouts import Place
from longstraw.runtime.numbers import Numbers
from longstraw.stages import Stateful, TokenInput


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

    def common(self, row: int, rows: Sequence[int]) -> list[int]:
        """Return how many tokens from the beginning each row has in common with one row, in everything it reads."""
        lengths = [self._stop] * len(rows)
        for value, dims in self._compared:
            if len(dims) > 1:
                token_start, per_row = dims[1], value
                same = (
                    (per_row[rows] == per_row[row]).flatten(2).all(-1)
                    if per_row.ndim > 2
                    else per_row[rows] == per_row[row]
                )
                for i, line in enumerate(same):
                    different = (~line).nonzero()
                    if len(different):
                        lengths[i] = min(lengths[i], token_start + int(different[0]))
            else:
                same = (value[rows] == value[row]).flatten(1).all(-1)
                lengths = [n if ok else 0 for n, ok in zip(lengths, same.tolist(), strict=True)]
        if torch.is_grad_enabled():
            # A value given for every row gets a gradient for every row, so rows can't share it.
            own = [self._numbers(t.repeated) for t in self._token_inputs if t.node in self._differentiable]
            lengths = [n if other == row else min([n, *own]) for n, other in zip(lengths, rows, strict=True)]
        return lengths

    @functools.cached_property
    def _token_inputs(self) -> list[TokenInput]:
        graphs = (self._branch.segment.body, *(head.graph for head in self._branch.segment.heads))
        return [t for graph in graphs for t in graph.inputs.tokens]

    @functools.cached_property
    def _compared(self) -> list[tuple[Tensor, tuple[int, ...]]]:
        """Return all that differs between rows, as `[rows, tokens, ...]` with its first token, or `[rows, ...]`."""
        found: list[tuple[Tensor, tuple[int, ...]]] = []
        seen: set[Any] = set()
        layouts = [(t.node, t.layout) for t in self._token_inputs]
        sizes = self._numbers.sizes
        for program in self._branch.masks:
            for node in program.inputs:
                if isinstance(node.meta.get("val"), Tensor):
                    located = sizes.locate_shape(sizes.shape(node.meta["val"]))
                    value = self._values[node]
                    if located is not None:
                        layouts.append((node, located))
                    elif (
                        value.shape[0] == self._numbers.rows
                    ):  # tokens unknown: rows are equal as a whole or not at all
                        found.append((value.reshape(self._numbers.rows, -1), (0,)))
        for node, layout in layouts:
            place = self._place(layout)
            key = (node, place)
            value = self._values[node]
            if key in seen or place.row_dim is None or not isinstance(value, Tensor):
                continue
            seen.add(key)
            parts = place.apart(value.detach(), self._numbers.rows, place.stop - place.start)
            if place.token_dim is None:
                found.append((parts.movedim(place.row_dim, 0).reshape(self._numbers.rows, -1), (0,)))
            else:
                moved = parts.movedim((place.row_dim, place.token_dim), (0, 1))
                found.append((moved, (0, place.start)))
        return found

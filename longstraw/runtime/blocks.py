"""Blocks of an attention mask at run time: what they say, and, only where needed, the blocks themselves.

A block is [q0, q1) query tokens by [k0, k1) key tokens, in absolute token numbers, for the rows given at `bind`.

    verdict(q0, q1, k0, k1)   "all": every query sees every key, bias 0; "none": no query sees any key; else "mixed"
    tensor(q0, q1, k0, k1)    [rows or 1, heads or 1, q, k], bool (True: seen) or a float bias

Verdicts come from interval arithmetic on the block's program (`intervals.py`): nothing of the block's size is made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeVar

import torch

from longstraw.blocks import (
    BlockProgram,
    Call,
    Count,
    Cut,
    Cuts,
    Fill,
    Lookup,
    Read,
    Reshape,
    Side,
    Slot,
    Step,
    Triangle,
)
from longstraw.runtime.intervals import (
    Box,
    Extremes,
    Interval,
    call_rule,
    compare,
    fit,
    join,
    span_of_product,
    span_of_sum,
)

__all__ = ["Blocks", "BoundBlocks", "CausalBlocks", "EverySeen", "Verdict", "bind", "both"]

Verdict = Literal["all", "none", "mixed"]
Rows = Sequence[int] | slice | None

_VERDICTS_KEPT = 1 << 16
_BOUNDS_KEPT = 1 << 16
_TENSORS_KEPT = 8
_LARGEST_KEPT = 1 << 22  # elements

_MISSING: Any = object()
_T = TypeVar("_T")


class Blocks(Protocol):
    """What the attention run time asks of a mask."""

    @property
    def device(self) -> torch.device: ...

    def verdict(self, q0: int, q1: int, k0: int, k1: int) -> Verdict: ...

    def tensor(self, q0: int, q1: int, k0: int, k1: int) -> torch.Tensor: ...


class CausalBlocks:
    """A query sees the keys up to itself, or with `causal=False` every key."""

    def __init__(self, causal: bool = True, device: torch.device | str = "cpu") -> None:
        self.causal = causal
        self.device = torch.device(device)

    def verdict(self, q0: int, q1: int, k0: int, k1: int) -> Verdict:
        if q1 <= q0 or k1 <= k0:
            return "none"
        if not self.causal or k1 - 1 <= q0:
            return "all"
        return "none" if k0 > q1 - 1 else "mixed"

    def tensor(self, q0: int, q1: int, k0: int, k1: int) -> torch.Tensor:
        if not self.causal:
            return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device).expand(1, 1, q1 - q0, k1 - k0)
        queries, keys = (torch.arange(start, end, device=self.device) for start, end in ((q0, q1), (k0, k1)))
        return (keys <= queries[:, None])[None, None]


class EverySeen(CausalBlocks):
    """Every query sees every key."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        super().__init__(False, device)


def both(first: Blocks, second: Blocks) -> Blocks:
    """A query sees what both masks let it see; biases add up."""
    return _Both(first, second)


class _Both:
    def __init__(self, first: Blocks, second: Blocks) -> None:
        self.first, self.second = first, second

    @property
    def device(self) -> torch.device:
        return self.first.device

    def verdict(self, q0: int, q1: int, k0: int, k1: int) -> Verdict:
        verdict = self.first.verdict(q0, q1, k0, k1)
        if verdict == "none":
            return verdict
        other = self.second.verdict(q0, q1, k0, k1)
        return other if verdict == "all" or other == "none" else "mixed"

    def tensor(self, q0: int, q1: int, k0: int, k1: int) -> torch.Tensor:
        first, second = self.first.tensor(q0, q1, k0, k1), self.second.tensor(q0, q1, k0, k1)
        if first.dtype == second.dtype == torch.bool:
            return first & second
        if second.dtype == torch.bool:
            return first.masked_fill(~second, float("-inf"))
        if first.dtype == torch.bool:
            return second.masked_fill(~first, float("-inf"))
        return first + second


def bind(
    program: BlockProgram,
    values: Sequence[torch.Tensor | int | float],
    rows: Rows = None,
    *,
    unseen: float = float("-inf"),
) -> BoundBlocks:
    """The blocks of a mask for some rows (None: all), given the whole values of `program.inputs`.

    `unseen`: a key whose bias is at most this, or the dtype's least number, is not seen. A finite number is right only
    where every query has another key that it sees.
    """
    assert len(values) == len(program.inputs), "one value per input"
    return BoundBlocks(program, values, rows, unseen)


class BoundBlocks:
    """A block program with its inputs; see `bind`."""

    def __init__(
        self,
        program: BlockProgram,
        values: Sequence[torch.Tensor | int | float],
        rows: Rows,
        unseen: float,
    ) -> None:
        self.program = program
        self.device = program.device
        self.dtype = program.dtype
        is_bias = self.dtype.is_floating_point and math.isfinite(unseen)
        self.unseen = max(unseen, torch.finfo(self.dtype).min) if is_bias else unseen
        self._rows = rows
        with torch.no_grad():
            self._reads = [
                self._read(step, values[step.input]) if isinstance(step, Read) else None for step in program.steps
            ]
        self._row_indices = self._find_rows(values)
        self._extremes: dict[int, Extremes] = {}
        self._rules = {index: call_rule(step) for index, step in enumerate(program.steps) if isinstance(step, Call)}
        self._sides = _sides(program.steps)
        self._one_sided: dict[tuple[int, tuple[int, ...]], Interval] = {}
        self._verdicts: dict[tuple[int, int, int, int], Verdict] = {}
        self._tensors: dict[tuple[int, int, int, int], torch.Tensor] = {}

    def verdict(self, q0: int, q1: int, k0: int, k1: int) -> Verdict:
        """What holds for the whole block."""
        key = (q0, q1, k0, k1)
        known = self._verdicts.get(key)
        if known is not None:
            return known
        return _remember(self._verdicts, key, self._judge(q0, q1, k0, k1), _VERDICTS_KEPT)

    def tensor(self, q0: int, q1: int, k0: int, k1: int) -> torch.Tensor:
        """The block itself. Do not write into it: it is kept for the next call."""
        key = (q0, q1, k0, k1)
        known = self._tensors.get(key)
        if known is not None:
            return known
        with torch.no_grad():
            block = self._build(q0, q1, k0, k1)
        return block if block.numel() > _LARGEST_KEPT else _remember(self._tensors, key, block, _TENSORS_KEPT)

    # Rows

    def _read(self, step: Read, value: torch.Tensor | int | float) -> torch.Tensor | int | float:
        """The value with its row dims restricted to the rows."""
        if not isinstance(value, torch.Tensor) or self._rows is None:
            return value
        for dim, cut in enumerate(step.cuts):
            if cut is not None and cut.side is Side.ROW:
                value = _select_rows(value, dim, cut.inner, self._rows)
        return value

    def _find_rows(self, values: Sequence[torch.Tensor | int | float]) -> list[int]:
        """The numbers of the rows; where no input has rows, all are the same and one stands for them."""
        if self._rows is not None and not isinstance(self._rows, slice):
            return list(self._rows)
        total: int | None = None
        for step in self.program.steps:
            if isinstance(step, Count) and step.num_rows is not None:
                total = self._number(step.num_rows, values)
            for dim, cut in enumerate(step.cuts if isinstance(step, Read) else ()):
                value = values[step.input] if isinstance(step, Read) else None
                if cut is not None and cut.side is Side.ROW and isinstance(value, torch.Tensor):
                    total = value.shape[dim] // cut.inner
        if total is None:
            return [0]
        return list(range(total))[self._rows] if isinstance(self._rows, slice) else list(range(total))

    def _number(self, number: int | Slot, values: Sequence[torch.Tensor | int | float]) -> int:
        if isinstance(number, int):
            return number
        step = self.program.steps[number.index]
        assert isinstance(step, Read)
        return int(values[step.input])

    # The block itself

    def _build(self, q0: int, q1: int, k0: int, k1: int) -> torch.Tensor:
        starts = {Side.ROW: 0, Side.QUERY: q0, Side.KEY: k0}
        lengths = {Side.ROW: len(self._row_indices), Side.QUERY: q1 - q0, Side.KEY: k1 - k0}
        results: list[Any] = []

        def get(arg: Any) -> Any:
            return results[arg.index] if isinstance(arg, Slot) else arg

        def shape(sizes: tuple[int | Cut, ...]) -> list[int]:
            return [lengths[size.side] * size.inner if isinstance(size, Cut) else size for size in sizes]

        def numbers(cut: Cut, device: torch.device) -> torch.Tensor:
            if cut.side is Side.ROW:
                return torch.tensor(self._row_indices, device=device)
            first = starts[cut.side] + cut.offset
            return torch.arange(first, first + lengths[cut.side], device=device)

        for index, step in enumerate(self.program.steps):
            match step:
                case Read():
                    result = self._reads[index]
                    if isinstance(result, torch.Tensor):
                        for dim, cut in enumerate(step.cuts):
                            if cut is not None and cut.side is not Side.ROW:
                                result = result.narrow(dim, starts[cut.side] + cut.offset, lengths[cut.side])
                case Fill():
                    one = torch.full((), get(step.value), dtype=step.dtype, device=step.device)
                    result = one.expand(shape(step.shape))
                case Count():
                    result = (get(step.start) + get(step.step) * numbers(step.cut, step.device)).to(step.dtype)
                case Reshape():
                    source = get(step.source)
                    result = source.expand(shape(step.shape)) if step.expand else source.reshape(shape(step.shape))
                case Triangle():
                    source = get(step.source)
                    distance = numbers(step.columns, source.device) - numbers(step.rows, source.device)[:, None]
                    diagonal = get(step.diagonal)
                    outside = distance < diagonal if step.upper else distance > diagonal
                    result = source.masked_fill(outside, 0)
                case Lookup():
                    indices = [slice(None) if item is None else get(item) for item in step.indices]
                    result = get(step.source)[tuple(indices)]
                case Call():
                    args = [get(arg) for arg in step.args]
                    result = step.op(*args, **{name: get(arg) for name, arg in step.kwargs.items()})
            results.append(result)
        return self._arranged(get(self.program.output), q1 - q0, k1 - k0)

    def _arranged(self, block: torch.Tensor, num_queries: int, num_keys: int) -> torch.Tensor:
        """[rows or 1, heads or 1, queries, keys] from the mask's own dims."""
        cuts, last = self.program.cuts, (self.program.query_dim, self.program.key_dim)
        others = [dim for dim in range(block.ndim) if dim not in last]
        block = block.permute([*others, *last])
        has_rows = bool(others) and (len(others) > 1 or cuts[others[0]] is not None)
        num_rows = 1
        if has_rows:
            cut = cuts[others[0]]
            num_rows = block.shape[0] // (cut.inner if cut is not None else 1)
        heads = 1
        for size in block.shape[:-2]:
            heads *= size
        block = block.reshape(num_rows, heads // max(num_rows, 1), *block.shape[-2:])
        return block.expand(-1, -1, num_queries, num_keys)

    # Its bounds

    def _judge(self, q0: int, q1: int, k0: int, k1: int) -> Verdict:
        if q1 <= q0 or k1 <= k0 or not self._row_indices:
            return "none"
        bounds = self._interval(q0, q1, k0, k1)
        if bounds is None:
            return "mixed"
        low, high = bounds
        if self.dtype == torch.bool:
            return "all" if low else "mixed" if high else "none"
        if low == high == 0:
            return "all"
        return "none" if high <= self.unseen else "mixed"

    def _interval(self, q0: int, q1: int, k0: int, k1: int) -> Interval:
        """Bounds of every element of the block."""
        ranges = {Side.QUERY: (q0, q1), Side.KEY: (k0, k1)}
        keys = {Side.ROW: (), **ranges}
        known = self._one_sided
        if len(known) > _BOUNDS_KEPT:
            known.clear()
        results: list[Interval] = []
        for index, (step, side) in enumerate(zip(self.program.steps, self._sides, strict=True)):
            key = None if side is None else (index, keys[side])
            bounds = _MISSING if key is None else known.get(key, _MISSING)
            if bounds is _MISSING:
                bounds = self._bounds(index, step, results, ranges)
                if key is not None:
                    known[key] = bounds
            results.append(bounds)
        return results[self.program.output.index]

    def _bounds(self, index: int, step: Step, results: list[Interval], ranges: dict[Side, tuple[int, int]]) -> Interval:
        def get(arg: Any) -> Interval:
            return results[arg.index] if isinstance(arg, Slot) else (arg, arg)

        def numbers(cut: Cut) -> Interval:
            if cut.side is Side.ROW:
                return min(self._row_indices), max(self._row_indices)
            first, end = ranges[cut.side]
            return first + cut.offset, end - 1 + cut.offset

        match step:
            case Read():
                value = self._reads[index]
                if not isinstance(value, torch.Tensor):
                    return None if value is None else (value, value)
                return self._table(index, value).within(_box(step.cuts, ranges))
            case Fill():
                return fit(get(step.value), step.dtype)
            case Count():
                return fit(span_of_sum(get(step.start), span_of_product(get(step.step), numbers(step.cut))), step.dtype)
            case Reshape():
                return get(step.source)
            case Triangle():
                columns, rows, diagonal = numbers(step.columns), numbers(step.rows), get(step.diagonal)
                assert columns is not None and rows is not None
                distance = columns[0] - rows[1], columns[1] - rows[0]
                outside = compare("lt" if step.upper else "gt", distance, diagonal)
                if outside == (0, 1):
                    return join((0, 0), get(step.source))
                return (0, 0) if outside == (1, 1) else get(step.source)
            case Lookup():
                source = self.program.steps[step.source.index]
                value = self._reads[step.source.index]
                assert isinstance(source, Read) and isinstance(value, torch.Tensor)
                box = list(_box(source.cuts, ranges))
                for dim, item in enumerate(step.indices):
                    found = results[item.index] if item is not None else None
                    if found is not None and found[0] >= 0 and found[1] < value.shape[dim]:
                        box[dim] = int(found[0]), int(found[1]) + 1
                return self._table(step.source.index, value).within(tuple(box))
            case Call():
                return self._rules[index](get)

    def _table(self, index: int, value: torch.Tensor) -> Extremes:
        if index not in self._extremes:
            self._extremes[index] = Extremes(value)
        return self._extremes[index]


def _box(cuts: Cuts, ranges: dict[Side, tuple[int, int]]) -> Box:
    """The part of a tensor that the cuts leave; rows have been selected."""
    box: list[tuple[int, int] | None] = []
    for cut in cuts:
        if cut is None or cut.side is Side.ROW:
            box.append(None)
        else:
            first, end = ranges[cut.side]
            box.append((first + cut.offset, end + cut.offset))
    return tuple(box)


def _select_rows(value: torch.Tensor, dim: int, inner: int, rows: Sequence[int] | slice) -> torch.Tensor:
    value = value.unflatten(dim, (-1, inner))
    numbers = list(range(value.shape[dim])[rows]) if isinstance(rows, slice) else list(rows)
    if numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True:
        value = value.narrow(dim, numbers[0] if numbers else 0, len(numbers))
    else:
        value = value.index_select(dim, torch.tensor(numbers, device=value.device))
    return value.flatten(dim, dim + 1)


def _sides(steps: Sequence[Step]) -> list[Side | None]:
    """Which token range each step's bounds depend on: ROW for neither, None for both."""
    found: list[set[Side]] = []
    for step in steps:
        match step:
            case Read():
                sides = {cut.side for cut in step.cuts if cut is not None}
            case Count():
                sides = {step.cut.side}
            case Triangle():
                sides = {Side.QUERY, Side.KEY}
            case Fill():
                sides = set()
            case Reshape():
                sides = found[step.source.index]
            case Lookup():
                sides = set().union(*(found[slot.index] for slot in (step.source, *step.indices) if slot is not None))
            case Call():
                args = (*step.args, *step.kwargs.values())
                sides = set().union(*(found[arg.index] for arg in args if isinstance(arg, Slot)))
        found.append(sides - {Side.ROW})
    return [None if len(sides) > 1 else next(iter(sides), Side.ROW) for sides in found]


def _remember(store: dict[tuple[int, int, int, int], _T], key: tuple[int, int, int, int], value: _T, kept: int) -> _T:
    """Keep the value, and only the newest `kept`."""
    store[key] = value
    while len(store) > kept:
        store.pop(next(iter(store)), None)
    return value

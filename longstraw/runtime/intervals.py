"""Interval arithmetic over the steps of a block program.

An interval (low, high) holds every element of a block; None means that nothing is known, NaN included. Bounds are
Python numbers: integers are exact, and a float op's bounds are rounded to the op's dtype as its elements are, which
is safe because rounding never changes an order.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any, cast

import torch

from longstraw.blocks import Call, Slot

__all__ = ["Box", "Extremes", "Interval", "call_rule", "compare", "fit", "join", "span_of_product", "span_of_sum"]

Number = bool | int | float
Interval = tuple[Number, Number] | None
Box = tuple[tuple[int, int] | None, ...]  # per dimension a range, or None for the whole
_Get = Callable[[Any], Interval]
_Rule = Callable[[Call, _Get], Interval]

_CHUNK = 64  # tokens that share one stored minimum and maximum
_ANSWERS_KEPT = 1 << 14
_PROFILES_KEPT = 4
_EXACT = 1 << 53  # integers up to here are float64 numbers


class Extremes:
    """Least and greatest element of any box of a tensor, from reductions that are made once."""

    def __init__(self, value: torch.Tensor) -> None:
        value = value.detach()
        value = value.to(torch.uint8) if value.dtype == torch.bool else value
        self.sizes = tuple(value.shape)
        for dim, stride in enumerate(value.stride()):
            if stride == 0 and value.shape[dim] > 1:  # expanded: all the same
                value = value.narrow(dim, 0, 1)
        self.value = value
        self.profiles: dict[tuple[int, Box], _Profile] = {}
        self.answers: dict[Box, Interval] = {}

    def within(self, box: Box) -> Interval:
        """Bounds of the elements in the box."""
        if box in self.answers:
            return self.answers.get(box)
        if len(self.answers) >= _ANSWERS_KEPT:
            self.answers.clear()
        found = self.answers[box] = self._find(box)
        return found

    def _find(self, box: Box) -> Interval:
        ranges = [
            None if self.value.shape[dim] == 1 or item == (0, size) else item
            for dim, (item, size) in enumerate(zip(box, self.sizes, strict=True))
        ]
        dims = [dim for dim, item in enumerate(ranges) if item is not None]
        if not self.value.numel():
            return None
        along = max(dims, key=lambda dim: self.sizes[dim], default=-1)
        key = (along, tuple(item if dim != along else None for dim, item in enumerate(ranges)))
        profile = self.profiles.get(key)
        if profile is None:
            part = self.value
            whole = len(self.profiles) < _PROFILES_KEPT
            for dim, item in enumerate(ranges):
                if item is not None and (dim != along or not whole):
                    part = part.narrow(dim, item[0], item[1] - item[0])
            if not whole or along < 0:
                return _interval(part.amin().item(), part.amax().item())
            profile = self.profiles[key] = _Profile(part, along)
        first, end = cast(tuple[int, int], ranges[along])
        return profile.between(first, end)


class _Profile:
    """Least and greatest element at each place along one dimension."""

    def __init__(self, value: torch.Tensor, along: int) -> None:
        others = [dim for dim in range(value.ndim) if dim != along and value.shape[dim] > 1]
        self.low = (value.amin(others) if others else value).flatten().cpu()
        self.high = (value.amax(others) if others else value).flatten().cpu()
        self.line: tuple[int, int] | None = None
        if not value.is_floating_point() and len(self.low) > 1 and torch.equal(self.low, self.high):
            numbers = self.low.to(torch.int64)
            steps = numbers[1:] - numbers[:-1]
            if bool((steps == steps[0]).all()):
                self.line = int(numbers[0]), int(steps[0])
                self.low = self.high = self.low[:0]  # not needed any more
        count = len(self.low) // _CHUNK
        self.chunk_low = self.low[: count * _CHUNK].view(count, _CHUNK).amin(1)
        self.chunk_high = self.high[: count * _CHUNK].view(count, _CHUNK).amax(1)

    def between(self, first: int, end: int) -> Interval:
        if self.line is not None:
            start, step = self.line
            ends = start + step * first, start + step * (end - 1)
            return min(ends), max(ends)
        first_chunk, end_chunk = -(-first // _CHUNK), end // _CHUNK
        if first_chunk >= end_chunk:
            return _interval(self.low[first:end].amin().item(), self.high[first:end].amax().item())
        low = [self.chunk_low[first_chunk:end_chunk].amin().item()]
        high = [self.chunk_high[first_chunk:end_chunk].amax().item()]
        for a, b in ((first, first_chunk * _CHUNK), (end_chunk * _CHUNK, end)):
            if a < b:
                low.append(self.low[a:b].amin().item())
                high.append(self.high[a:b].amax().item())
        return None if any(math.isnan(item) for item in low) else _interval(min(low), max(high))


def _interval(low: Number, high: Number) -> Interval:
    return None if math.isnan(low) or math.isnan(high) else (low, high)


def fit(bounds: Interval, dtype: torch.dtype) -> Interval:
    """Bounds after a cast to the dtype."""
    if bounds is None:
        return None
    low, high = bounds
    if dtype == torch.bool:
        return int(low > 0 or high < 0), int(low != 0 or high != 0)
    if dtype.is_floating_point:
        if low == high:
            low = high = _rounded(low, dtype)
        else:
            low, high = _rounded(low, dtype), _rounded(high, dtype)
        return _interval(low, high)
    if dtype.is_complex or not (math.isfinite(low) and math.isfinite(high)):
        return None
    low, high = int(low), int(high)
    limits = _LIMITS.get(dtype)
    return (low, high) if limits is not None and limits[0] <= low and high <= limits[1] else None


_LIMITS = {
    dtype: (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
}


def _rounded(value: Number, dtype: torch.dtype) -> float:
    if isinstance(value, int) and abs(value) > _EXACT:
        return math.nan  # torch rounds once, Python would round twice
    if value == 0 or dtype == torch.float64:
        return float(value)
    single = ctypes.c_float(value).value
    return single if dtype == torch.float32 else float(torch.tensor(single, dtype=torch.float32).to(dtype))


def join(first: Interval, second: Interval) -> Interval:
    """Bounds of what may come from either."""
    if first is None or second is None:
        return None
    return min(first[0], second[0]), max(first[1], second[1])


def compare(name: str, left: Interval, right: Interval) -> Interval:
    """Bounds of a comparison, as 0 and 1."""
    if left is None or right is None:
        return 0, 1
    always, never = _COMPARISONS[name](left, right)
    return int(always), int(not never)


_COMPARISONS: dict[str, Callable[[tuple[Number, Number], tuple[Number, Number]], tuple[bool, bool]]] = {
    "lt": lambda a, b: (a[1] < b[0], a[0] >= b[1]),
    "le": lambda a, b: (a[1] <= b[0], a[0] > b[1]),
    "gt": lambda a, b: (a[0] > b[1], a[1] <= b[0]),
    "ge": lambda a, b: (a[0] >= b[1], a[1] < b[0]),
    "eq": lambda a, b: (a[0] == a[1] == b[0] == b[1], a[1] < b[0] or a[0] > b[1]),
    "ne": lambda a, b: (a[1] < b[0] or a[0] > b[1], a[0] == a[1] == b[0] == b[1]),
}


def span_of_sum(left: Interval, right: Interval) -> Interval:
    """Bounds of a sum, not rounded."""
    if left is None or right is None:
        return None
    if (left[0] == -math.inf and right[1] == math.inf) or (left[1] == math.inf and right[0] == -math.inf):
        return None
    return left[0] + right[0], left[1] + right[1]


def span_of_product(left: Interval, right: Interval) -> Interval:
    """Bounds of a product, not rounded."""
    if left is None or right is None:
        return None
    for a, b in ((left, right), (right, left)):
        if (math.isinf(a[0]) or math.isinf(a[1])) and b[0] <= 0 <= b[1]:
            return None
    ends = [a * b for a in left for b in right]
    return min(ends), max(ends)


def _negated(bounds: Interval) -> Interval:
    return None if bounds is None else (-bounds[1], -bounds[0])


def _quotient(left: Interval, right: Interval) -> Interval:
    """Bounds of a true division, widened: devices may multiply by a rounded inverse."""
    if left is None or right is None or right[0] <= 0 <= right[1] or not all(math.isfinite(v) for v in (*left, *right)):
        return None
    if not all(1e-30 < abs(item) < 1e30 for item in right):
        return None
    ends = [a / b for a in left for b in right]
    low, high = min(ends), max(ends)
    return low - abs(low) * 2**-6, high + abs(high) * 2**-6


def _floor_quotient(left: Interval, right: Interval) -> Interval:
    if left is None or right is None or right[0] != right[1] or right[0] <= 0 or not _whole(left, right):
        return None
    return left[0] // right[0], left[1] // right[0]


def _remainder(left: Interval, right: Interval) -> Interval:
    if left is None or right is None or right[0] != right[1] or right[0] <= 0 or not _whole(left, right):
        return None
    if left[0] // right[0] == left[1] // right[0]:
        return left[0] % right[0], left[1] % right[0]
    return 0, right[0] - 1


def _whole(*intervals: tuple[Number, Number]) -> bool:
    return all(isinstance(item, int) for bounds in intervals for item in bounds)


def _absolute(bounds: Interval) -> Interval:
    if bounds is None:
        return None
    low, high = sorted((abs(bounds[0]), abs(bounds[1])))
    return (0, high) if bounds[0] <= 0 <= bounds[1] else (low, high)


def _least(left: Interval, right: Interval) -> Interval:
    return None if left is None or right is None else (min(left[0], right[0]), min(left[1], right[1]))


def _greatest(left: Interval, right: Interval) -> Interval:
    return None if left is None or right is None else (max(left[0], right[0]), max(left[1], right[1]))


def _truth(bounds: Interval) -> tuple[Number, Number]:
    return fit(bounds, torch.bool) or (0, 1)


def _and(left: Interval, right: Interval) -> Interval:
    return _least(_truth(left), _truth(right))


def _or(left: Interval, right: Interval) -> Interval:
    return _greatest(_truth(left), _truth(right))


def _xor(left: Interval, right: Interval) -> Interval:
    return compare("ne", _truth(left), _truth(right))


def _not(bounds: Interval) -> Interval:
    low, high = _truth(bounds)
    return 1 - high, 1 - low


def call_rule(step: Call) -> Callable[[_Get], Interval]:
    """How to bound an op's result; the rule is called with a function that bounds a slot or a number."""
    rule = _RULES.get(step.op._schema.name.removeprefix("aten::"))
    return (lambda get: None) if rule is None else lambda get: fit(rule(step, get), step.dtype)


def _operand(arg: Any, get: _Get, dtype: torch.dtype) -> Interval:
    """Bounds in the dtype that operands meet in; some kernels round a plain number to it and some do not."""
    bounds = get(arg)
    rounded = fit(bounds, dtype)
    return rounded if isinstance(arg, Slot) else join(bounds, rounded)


def _arithmetic(function: Callable[..., Interval], num_args: int) -> _Rule:
    def rule(step: Call, get: _Get) -> Interval:
        if len(step.args) != num_args or any(value != 1 for value in step.kwargs.values()):
            return None  # alpha, rounding modes
        return function(*(_operand(arg, get, step.common) for arg in step.args))

    return rule


def _logic(function: Callable[..., Interval], *, bitwise: bool = False) -> _Rule:
    def rule(step: Call, get: _Get) -> Interval:
        return None if bitwise and step.dtype != torch.bool else function(*(get(arg) for arg in step.args))

    return rule


def _divide(step: Call, get: _Get) -> Interval:
    mode = step.kwargs.get("rounding_mode")
    function = {None: _quotient, "floor": _floor_quotient}.get(mode)
    dtype = step.dtype if mode is None else step.common
    return None if function is None else function(*(_operand(arg, get, dtype) for arg in step.args[:2]))


def _clamp(step: Call, get: _Get) -> Interval:
    name = step.op._schema.name.removeprefix("aten::")
    bounds = _operand(step.args[0], get, step.dtype)
    low, high = [*step.args[1:], None, None][:2] if name != "clamp_max" else (None, step.args[1])
    low, high = step.kwargs.get("min", low), step.kwargs.get("max", high)
    if low is not None:
        bounds = _greatest(bounds, _operand(low, get, step.dtype))
    return bounds if high is None else _least(bounds, _operand(high, get, step.dtype))


def _where(step: Call, get: _Get) -> Interval:
    if len(step.args) != 3:
        return None
    condition, yes, no = step.args
    return _chosen(get(condition), fit(get(yes), step.dtype), fit(get(no), step.dtype))


def _masked_fill(step: Call, get: _Get) -> Interval:
    source, mask, value = step.args
    return _chosen(get(mask), fit(get(value), step.dtype), get(source))


def _chosen(condition: Interval, yes: Interval, no: Interval) -> Interval:
    low, high = _truth(condition)
    return yes if low else join(yes, no) if high else no


def _same(step: Call, get: _Get) -> Interval:
    return get(step.args[0])


def _compared(name: str) -> _Rule:
    return _arithmetic(lambda left, right: compare(name, left, right), 2)


_difference = cast(Callable[..., Interval], lambda left, right: span_of_sum(left, _negated(right)))
_RULES: dict[str, _Rule] = {
    **{name: _compared(name) for name in _COMPARISONS},
    "less": _compared("lt"),
    "less_equal": _compared("le"),
    "greater": _compared("gt"),
    "greater_equal": _compared("ge"),
    "not_equal": _compared("ne"),
    "add": _arithmetic(span_of_sum, 2),
    "sub": _arithmetic(_difference, 2),
    "subtract": _arithmetic(_difference, 2),
    "rsub": _arithmetic(lambda left, right: _difference(right, left), 2),
    "mul": _arithmetic(span_of_product, 2),
    "multiply": _arithmetic(span_of_product, 2),
    "neg": _arithmetic(_negated, 1),
    "negative": _arithmetic(_negated, 1),
    "abs": _arithmetic(_absolute, 1),
    "absolute": _arithmetic(_absolute, 1),
    "floor_divide": _arithmetic(_floor_quotient, 2),
    "remainder": _arithmetic(_remainder, 2),
    "minimum": _arithmetic(_least, 2),
    "maximum": _arithmetic(_greatest, 2),
    "min": _arithmetic(_least, 2),
    "max": _arithmetic(_greatest, 2),
    "relu": _arithmetic(lambda bounds: _greatest(bounds, (0, 0)), 1),
    **dict.fromkeys(("div", "divide", "true_divide"), _divide),
    **dict.fromkeys(("clamp", "clip", "clamp_min", "clamp_max"), _clamp),
    **dict.fromkeys(("logical_and",), _logic(_and)),
    **dict.fromkeys(("bitwise_and", "__and__"), _logic(_and, bitwise=True)),
    **dict.fromkeys(("logical_or",), _logic(_or)),
    **dict.fromkeys(("bitwise_or", "__or__"), _logic(_or, bitwise=True)),
    **dict.fromkeys(("logical_xor",), _logic(_xor)),
    **dict.fromkeys(("bitwise_xor", "__xor__"), _logic(_xor, bitwise=True)),
    "logical_not": _logic(_not),
    "bitwise_not": _logic(_not, bitwise=True),
    "where": _where,
    "masked_fill": _masked_fill,
    **dict.fromkeys(("to", "_to_copy", "clone", "permute", "slice", "select"), _same),
}

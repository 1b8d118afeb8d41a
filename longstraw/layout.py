"""Layouts: what each dim of a tensor runs over, and how sizes with shape symbols are compared.

A *layout* says, for each dim of a tensor, what it runs over: a tuple of factors, major to minor. A factor is `ROWS`, a
`Tokens` window, `Shuffled` (rows and tokens in an order that the data chose), or a plain size. `()` is a dim of size 1.
So hidden states `[G, S, H]` are `((ROWS,), (Tokens(0, S),), (H,))`, and `x.view(-1, H)` is
`((ROWS, Tokens(0, S)), (H,))`.

Sizes are compared by their values at two fixed points ("probes") of the shape symbols: two ints per size, exact
arithmetic, no symbolic simplification.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import sympy

from longstraw.compat import expression
from longstraw.errors import UnsupportedOp

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
    """A small histogram over entries' values; has a meaning only beside entries in the order of those values."""

    values: str
    size: Probe


Factor = Rows | Tokens | Shuffled | Counts | Probe
Dim = tuple[Factor, ...]
Layout = tuple[Dim, ...]


def has(dim: Dim, kind: type) -> bool:
    """Return whether a dim runs over `kind` (also below a shuffle)."""
    return any(isinstance(f, kind) or (isinstance(f, Shuffled) and has(f.of, kind)) for f in dim)


def over_pairs(layout: Layout, kind: type) -> bool:
    """Return whether two dims of a layout run over rows, or two over tokens: values of pairs of them."""
    return sum(has(dim, kind) for dim in layout) > 1


def find_dim(layout: Layout, kind: type) -> int | None:
    """Return the index of the one dim that runs over `kind`, or None."""
    return next((i for i, dim in enumerate(layout) if has(dim, kind)), None)


def window(layout: Layout) -> Tokens | None:
    """Return the token window of a layout, or None when it doesn't run over tokens."""
    for dim in layout:
        for factor in unshuffled(dim):
            if isinstance(factor, Tokens):
                return factor
    return None


def unshuffled(dim: Dim) -> Iterable[Factor]:
    """Yield a dim's factors, those below a shuffle in its place."""
    for factor in dim:
        if isinstance(factor, Shuffled):
            yield from unshuffled(factor.of)
        else:
            yield factor


def is_dispatched(layout: Layout) -> bool:
    """Return whether a value is in the order of experts, or counts entries in it: it has a meaning only as a whole."""
    return any(has(dim, Shuffled) or has(dim, Counts) for dim in layout)


def numbers_per_token(layout: Layout) -> int:
    """Return how many numbers a value has per row and token, by its layout: entries sent to k experts count k times."""
    count = 1
    for dim in layout:
        for factor in unshuffled(dim):
            if isinstance(factor, tuple):
                count *= factor[0]
    return count


def bytes_per_token(layout: Layout, value: Any) -> int:
    """Return how many bytes a (fake) tensor has per row and token; 0 when it doesn't run over tokens."""
    runs = any(has(dim, Tokens) for dim in layout)
    return numbers_per_token(layout) * int(value.element_size()) if runs else 0


class Sizes:
    """Compares sizes that contain shape symbols.

    Args:
        rows: number of rows of the step.
        tokens: number of tokens of a row.
        windows: how many tokens parts of a row have, where that is a plain number.
    """

    def __init__(self, rows: Any, tokens: Any, *, windows: Iterable[int] = ()) -> None:
        self._windows = frozenset(windows)
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
            if any(type(x).__name__ == "FloorDiv" and x.args[1].free_symbols for x in expr.atoms(sympy.Function)):
                raise UnsupportedOp(
                    f"The size {expr} is a quotient of two sizes of the step, as G // B of responses and prompts.",
                    remedy="Repeat the prompts before the step, one for each response, and pass those.",
                )
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

    def size_of_dim(self, dim: Dim) -> sympy.Expr:
        """Return a dim's size with its symbols; that of a plain number with none, one that is neither as 0."""
        size = sympy.Integer(1)
        for factor in unshuffled(dim):
            match factor:
                case Rows():
                    size *= self.rows_expr
                case Tokens(start, stop):
                    size *= stop - start
                case (a, b) if a == b:
                    size *= a
                case _:
                    return sympy.Integer(0)
        return sympy.expand(size)

    def is_static(self, size: Probe) -> bool:
        """Return whether a size is a plain number."""
        return size[0] == size[1]

    def width(self, value: Any) -> int:
        """Return how many numbers a value has per row and token, judged by its sizes: the product of its plain dims."""
        count = 1
        sizes = [expression(size) for size in value.shape]
        if self.is_static(self.rows) and sizes[:1] == [self.rows[0]] and any(size.free_symbols for size in sizes):
            del sizes[0]
        if not any(self.counts_tokens(size) for size in sizes):
            window = next((i for i, size in enumerate(sizes) if size in self._windows), None)
            sizes = [size for i, size in enumerate(sizes) if i != window]
        for expr in sizes:
            if not expr.free_symbols:
                count *= int(expr)
        return count

    def counts_tokens(self, size: Any) -> bool:
        """Return whether a size depends on the number of tokens of a row."""
        symbols = self.tokens_expr.free_symbols - self.rows_expr.free_symbols
        return bool(expression(size).free_symbols & symbols)

    def has_window(self, shape: tuple[Probe, ...]) -> bool:
        """Return whether a dim after the first is as long as a part of a row that has a plain number of tokens."""
        return any(self.is_static(size) and size[0] in self._windows for size in shape[1:])

    def locate(self, size: Probe, *, first: bool = False, among: Tokens | None = None) -> Dim | None:
        """Return what a dim of this size runs over, judged by size alone; None when the size says nothing.

        Where the number of rows is a constant (the step's code loops over rows, or names their number), only a first
        dim of that size is taken for rows, in a value that runs over tokens, too.

        Args:
            size: the dim's size.
            first: whether it is the first dim of its tensor.
            among: the tokens that a dim may run over; all of a row by default.
        """
        if size == (1, 1):
            return ()
        rows: Dim = () if self.rows == (1, 1) or (self.is_static(self.rows) and not first) else (ROWS,)
        if rows and size == self.rows:
            return rows
        tokens = among or self.full
        if self.is_static(size) and size == self.of(tokens):
            return (tokens,)
        if self.is_static(size):
            return (size,)
        dims: list[Dim] = [(tokens,), (*rows, tokens)]
        for dim in reversed(dims) if self.is_static(self.rows) else dims:
            base = self.of_dim(dim)
            if all(s % b == 0 for s, b in zip(size, base, strict=True)):
                rest = (size[0] // base[0], size[1] // base[1])
                if self.is_static(rest):
                    return dim if rest == (1, 1) else (*dim, rest)
        return None

    def locate_shape(self, shape: tuple[Probe, ...], among: Tokens | None = None) -> Layout | None:
        """Return the layout of a value judged by its sizes alone, or None; dims run over all tokens, or `among`."""
        over_tokens = any(not self.is_static(size) for size in shape)
        dims = [self.locate(size, first=i == 0 and over_tokens, among=among) for i, size in enumerate(shape)]
        return None if any(dim is None for dim in dims) else tuple(dim for dim in dims if dim is not None)

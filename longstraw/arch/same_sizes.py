"""Sizes of two inputs that have symbols of their own and are equal in the traced call.

Dynamo gives every size of every input a symbol, so the labels of `model(input_ids=ids, labels=labels)` are as many as
the tokens only in numbers. Where a rule meets such a size, the step is traced again under a guard that they are equal:
for each of their factors, as `G * (T - 1)` has rows and tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

import sympy
from torch import fx

from longstraw.compat import expression, symbol_values
from longstraw.errors import UnsupportedOp

Equality = tuple[sympy.Expr, sympy.Expr]


class SizesApart(UnsupportedOp):
    """Sizes with different symbols meet, which are equal in this call: the step can be traced under that guard.

    Attributes:
        equal: what to guard on.
    """

    def __init__(self, refusal: UnsupportedOp, equal: tuple[Equality, ...]) -> None:
        super().__init__(refusal.what, where=refusal.where, remedy=refusal.remedy)
        self.refusal, self.equal = refusal, equal


@dataclass(frozen=True)
class Symbols:
    """What is known of the shape symbols of a step.

    Attributes:
        values: each symbol's value in the traced call.
        places: which dim of an input it is the size of.
        names: the inputs that have it, as the user writes them.
    """

    values: Mapping[sympy.Expr, int] = field(default_factory=dict)
    places: Mapping[sympy.Expr, int] = field(default_factory=dict)
    names: Mapping[sympy.Expr, str] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: fx.Graph, names: Mapping[str, str]) -> Symbols:
        """Return the symbols of a graph's inputs; `names` are the inputs' by their placeholders'."""
        inputs = graph.find_nodes(op="placeholder")
        found = cls(symbol_values([node.meta["val"] for node in inputs]), {}, {})
        for node in inputs:
            for place, size in enumerate(getattr(node.meta["val"], "shape", ())):
                expr = expression(size)
                if expr.is_Symbol and expr not in found.places:
                    found.places[expr] = place  # type: ignore[index]
                    found.names[expr] = names.get(node.name, node.name)  # type: ignore[index]
        return found

    def equalities(self, size: sympy.Expr, other: sympy.Expr) -> tuple[Equality, ...]:
        """Return what makes one size the other, if they are equal in the traced call; else nothing."""
        symbols = size.free_symbols | other.free_symbols
        if size == other or not symbols <= self.values.keys() or self.value(size) != self.value(other):
            return ()
        try:
            left, right = _factors(size), _factors(other)
            linear = sympy.Poly(size - other, *symbols).total_degree() == 1
        except sympy.PolynomialError:
            return ()
        for factor in [x for x in left if x in right]:
            if factor in left and factor in right:
                left.remove(factor)
                right.remove(factor)
        if len(left) != len(right):
            return (_reduced(size, other),) if linear else ()
        pairings = [tuple(zip(left, order, strict=True)) for order in itertools.permutations(right)]
        fit = [pairs for pairs in pairings if all(self.value(x) == self.value(y) for x, y in pairs)]
        return tuple(_reduced(x, y) for x, y in min(fit, key=self._crossed, default=()))

    def value(self, size: sympy.Expr) -> int:
        """Return a size's value in the traced call."""
        return int(size.subs(self.values))

    def _crossed(self, pairs: tuple[Equality, ...]) -> int:
        """Return how many pairs take a number of rows for one of tokens, or the other way round."""
        return sum(self._dims(x) != self._dims(y) for x, y in pairs)

    def _dims(self, size: sympy.Expr) -> set[int]:
        return {self.places[s] for s in size.free_symbols if s in self.places}

    def owners(self, size: sympy.Expr) -> str:
        """Return the names of the inputs that a size comes from."""
        return " and ".join(sorted({self.names[s] for s in size.free_symbols if s in self.names}))


def _reduced(size: sympy.Expr, other: sympy.Expr) -> Equality:
    """Return an equality without what both sides have: only then is a guard on it solved for a symbol."""
    terms = sympy.Add.make_args(sympy.expand(size - other))
    left = [x for x in terms if not x.could_extract_minus_sign()]
    return sympy.Add(*left), sympy.Add(*(-x for x in terms if x not in left))


def _factors(size: sympy.Expr) -> list[sympy.Expr]:
    constant, factors = sympy.factor_list(size)
    return [*([constant] if constant != 1 else []), *(factor for factor, times in factors for _ in range(times))]

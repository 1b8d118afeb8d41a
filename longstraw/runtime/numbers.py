"""What the symbols of a step's shapes are worth in one call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from longstraw import compat
from longstraw.layout import Counts, Rows, Sizes, Tokens, unshuffled
from longstraw.runtime.layouts import Place


class Numbers:
    """The shape symbols' values in one step.

    Args:
        sizes: the step's symbolic sizes.
        values: placeholder values.
    """

    def __init__(self, sizes: Sizes, values: Mapping[fx.Node, Any]) -> None:
        self.sizes = sizes
        self._known: dict[sympy.Expr, int] = {}
        for node, value in values.items():
            traced = node.meta.get("val")
            if isinstance(traced, torch.SymInt):
                self._learn(traced, value)
            elif isinstance(traced, Tensor) and isinstance(value, Tensor):
                for size, actual in zip(traced.shape, value.shape, strict=True):
                    self._learn(size, actual)
        self._cache: dict[sympy.Expr, int] = {}
        self.rows, self.tokens = self(sizes.rows_expr), self(sizes.tokens_expr)

    def _learn(self, size: Any, actual: Any) -> None:
        if isinstance(size, torch.SymInt):
            expr = compat.expression(size)
            if isinstance(expr, sympy.Symbol):
                self._known[expr] = int(actual)

    def __call__(self, expr: sympy.Expr) -> int:
        """Return an expression's value."""
        if expr not in self._cache:
            self._cache[expr] = int(sympy.sympify(expr).subs(self._known))
        return self._cache[expr]

    def place(self, layout: Any) -> Place:
        """Return a layout with numbers in it."""
        shape: list[int] = []
        groups: list[int] = []
        row_dim = token_dim = None
        start, stop = 0, 0
        for dim in layout:
            factors = list(unshuffled(dim))
            groups.append(len(factors))
            for factor in factors:
                match factor:
                    case Rows():
                        row_dim = len(shape)
                        shape.append(-1)
                    case Tokens(first, last):
                        token_dim = len(shape)
                        start, stop = self(first), self(last)
                        shape.append(-2)
                    case Counts(_, size):
                        shape.append(size[0])
                    case (size, _):
                        shape.append(size)
        return Place(tuple(shape), tuple(groups), row_dim, token_dim, start, stop)

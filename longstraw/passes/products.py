"""Writes an einsum of queries and keys, or of weights and values, as the matrix product that it is.

Used by normalise. Only products with two dims of one size that isn't a number (scores, or what they weigh) are written
so: there `matmul` is what attention is recognised by.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

from longstraw.arch.aten import einsum_letters
from longstraw.arch.rules import arguments, emit, packet
from longstraw.compat import expression

aten = torch.ops.aten


def write_einsums_as_products(graph: fx.Graph) -> None:
    """Put a matrix product, between permutations of dims, in place of every such einsum."""
    for node in list(graph.nodes):
        if packet(node.target) is not aten.einsum or len(arguments(node)["tensors"]) != 2:
            continue
        left, right = arguments(node)["tensors"]
        if not any(_is_square(x.meta["val"]) for x in (node, left, right)):
            continue
        with graph.inserting_before(node):
            new = _product(node, left, right)
        if new is not None:
            node.replace_all_uses_with(new)
            graph.erase_node(node)


def _is_square(value: torch.Tensor) -> bool:
    """Return whether two dims have the same size, which is no number."""
    sizes = [expression(size) for size in value.shape]
    return any(size.free_symbols and size in sizes[i + 1 :] for i, size in enumerate(sizes))


def _product(node: fx.Node, left: fx.Node, right: fx.Node) -> fx.Node | None:
    """Return `[batch, own of left, summed] @ [batch, summed, own of right]`, or None for an einsum of another form."""
    shapes = [left.meta["val"].shape, right.meta["val"].shape]
    (a, b), result = einsum_letters(arguments(node)["equation"], [len(shape) for shape in shapes])
    if [letter for letter in result if letter in {*a} ^ {*b}][-1:] == [letter for letter in a if letter not in b]:
        left, right, a, b, shapes = right, left, b, a, shapes[::-1]  # what comes last in the result stands on the right
    summed = [letter for letter in a if letter in b and letter not in result]
    of_a, of_b = (
        dict(zip(term, map(expression, shape), strict=True)) for term, shape in ((a, shapes[0]), (b, shapes[1]))
    )
    row, column = _matrix_dim(a, b, of_a), _matrix_dim(b, a, of_b)
    once = all(len(set(term)) == len(term) for term in (a, b, result))
    if not once or len(summed) != 1 or row is None or column is None or not {*a, *b} - {*summed} <= set(result):
        return None
    if of_a[summed[0]] != of_b[summed[0]]:  # one of them is broadcast
        return None
    batch = [letter for letter in result if letter not in (row, column)]
    call = functools.partial(emit, node.graph, node)
    one = _permuted(call, left, a, [*batch, row, *summed])
    other = _permuted(call, right, b, [*batch, *summed, column])
    return _permuted(call, call(aten.matmul.default, one, other), [*batch, row, column], result)


def _matrix_dim(letters: list[str], others: list[str], sizes: dict[str, Any]) -> str | None:
    """Return which of the dims that only one operand has is a dim of the matrices, or None where that isn't clear.

    Of several it is the one whose size is no number. The others are dims of the batch, in which the other operand is
    the same throughout.
    """
    own = [letter for letter in letters if letter not in others]
    tokens = [letter for letter in own if sizes[letter].free_symbols]
    return own[0] if len(own) == 1 else tokens[0] if len(tokens) == 1 else None


def _permuted(call: Any, value: fx.Node, letters: list[str], wanted: list[str]) -> fx.Node:
    """Return a value with its dims in the order wanted, of size 1 where it has none."""
    order = [letters.index(letter) for letter in wanted if letter in letters]
    found: fx.Node = value if order == sorted(order) else call(aten.permute.default, value, order)
    for i, letter in enumerate(wanted):
        if letter not in letters:
            found = call(aten.unsqueeze.default, found, i)
    return found

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
    batch = [letter for letter in result if letter in a and letter in b]
    summed = [letter for letter in a if letter in b and letter not in result]
    of_left, of_right = ([letter for letter in own if letter not in other] for own, other in ((a, b), (b, a)))
    once = all(len(set(term)) == len(term) for term in (a, b, result))
    one_each = len(summed) == len(of_left) == len(of_right) == 1 and {*of_left, *of_right} <= set(result)
    if not once or not one_each:
        return None
    sizes = [expression(shape[term.index(summed[0])]) for shape, term in zip(shapes, (a, b), strict=True)]
    if sizes[0] != sizes[1]:  # one of them is broadcast
        return None
    call = functools.partial(emit, node.graph, node)
    one = _permuted(call, left, a, [*batch, *of_left, *summed])
    other = _permuted(call, right, b, [*batch, *summed, *of_right])
    return _permuted(call, call(aten.matmul.default, one, other), [*batch, *of_left, *of_right], result)


def _permuted(call: Any, value: fx.Node, letters: list[str], wanted: list[str]) -> fx.Node:
    order = [letters.index(letter) for letter in wanted]
    found: fx.Node = value if order == sorted(order) else call(aten.permute.default, value, order)
    return found

"""Which tokens at the ends of rows need not run: padding, and responses whose advantage is zero.

Forward leaves out the tokens after the last one of a row that the loss reads: what it computes of the others meets
nothing but zeros of its masks. Those are known before the model runs (`passes/find_reads.py`). Backward leaves out the
tokens to whose results, and to those of all later tokens of the row, the loss sends exactly zero. A result that isn't
finite counts as needed there, because zero times infinity is no number and eager would say so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from longstraw.runtime.layouts import Place
from longstraw.runtime.prefix_tree import Node, grouped


def read(finder: fx.GraphModule, inputs: Sequence[Any], results: Sequence[Tensor]) -> list[Tensor]:
    """Return for each result which of its entries the loss reads, as bools of its shape.

    Args:
        finder: `(*inputs, *blanks, *marks) -> (ended marks, cut values)`, see `passes/find_reads.py`.
        inputs: of the step.
        results: zeros in place of each result.
    """
    with torch.inference_mode(False), torch.enable_grad(), torch.autograd.set_detect_anomaly(False):
        given = finder.graph.find_nodes(op="placeholder")[: len(inputs)]
        known = [_recordable(x) if node.users else x for node, x in zip(given, inputs, strict=True)]
        blanks = [torch.zeros_like(r, requires_grad=r.is_floating_point()) for r in results]
        marks = [torch.ones_like(r, dtype=torch.float32, requires_grad=True) for r in results]
        ended, cut = finder(*known, *blanks, *marks)
        assert all(mark.requires_grad for mark in ended), "marks are followed by autograd"
        reached, spoilt = _gradients(ended, marks), _gradients(cut, blanks)
        return [(mark != 0) | ~blank.isfinite() for mark, blank in zip(reached, spoilt, strict=True)]


def _recordable(value: Any) -> Any:
    """Return a value that autograd may keep, which it may not do with one made under inference mode."""
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value


def _gradients(values: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of the sum of all values with respect to leaves, zeros where there is none."""
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    total = [value.sum() for value in values if value.requires_grad]
    found = torch.autograd.grad(total, wanted, allow_unused=True) if total and wanted else [None] * len(wanted)
    by_leaf = {id(leaf): grad for leaf, grad in zip(wanted, found, strict=True)}
    grads = [by_leaf.get(id(leaf)) for leaf in leaves]
    return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, grads, strict=True)]


def sent(results: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return for each result which of its entries backward needs, as bools; None where none has a gradient.

    Args:
        results: whole results.
        grads: their gradients; None for those without one.
    """
    return [
        None if grad is None else (grad != 0) | ~result.isfinite() for result, grad in zip(results, grads, strict=True)
    ]


def ends(entries: Sequence[Tensor | None], places: Sequence[Place], num_rows: int, stop: int) -> list[int]:
    """Return for each row where the last token ends that has to run, 0 where none has to.

    Args:
        entries: which entries of each result are needed; None for none, not even as zeros.
        places: the layouts of the results.
        num_rows: rows of the step.
        stop: where rows end: a result without a token dim needs all tokens.
    """
    found = torch.zeros(num_rows, dtype=torch.long)
    for whole, place in zip(entries, places, strict=True):
        if whole is None:
            continue
        needed = place.apart(whole, num_rows, place.stop - place.start)
        if place.row_dim is None:
            needed, rows = needed.expand(num_rows, *needed.shape), 0
        else:
            rows = place.row_dim
        if place.token_dim is None:
            end = torch.where(needed.movedim(rows, 0).reshape(num_rows, -1).any(-1), stop, 0)
        else:
            tokens = place.token_dim + (place.row_dim is None)
            line = needed.movedim((rows, tokens), (0, 1)).reshape(num_rows, place.stop - place.start, -1).any(-1)
            last = line.shape[1] - line.flip(1).byte().argmax(-1)
            end = torch.where(line.any(-1), place.start + last, 0)
        found = torch.maximum(found, end.cpu())
        if not bool(needed.any()):  # a gradient of zeros is still a gradient
            found[0] = max(int(found[0]), place.start + 1)
    as_list: list[int] = found.tolist()
    return as_list


def shortened(
    leaves: Sequence[Node], ends: Sequence[int], *, page: int, batch: Callable[[int], int] | None
) -> list[Node]:
    """Return nodes for the needed tokens of leaves that start together.

    Args:
        leaves: children of one node.
        ends: where the needed tokens of each row of the step end.
        page: rows run together where the pages are equal in number that they need; no row runs more than one in vain.
        batch: `tokens per row -> rows that run together`; None leaves the rows of each leaf together.
    """
    groups: list[tuple[list[int], bool]] = []
    apart: list[int] = []
    for leaf in leaves:
        rows = [row for row in leaf.rows if ends[row] > leaf.start]
        if leaf.shared or batch is None:
            groups += [(leaf.rows, leaf.shared)] if rows else []
        else:
            apart += rows
    if batch is not None and apart:
        groups += [(rows, False) for rows in grouped(apart, ends, start=leaves[0].start, page=page, batch=batch)]
    return [Node(rows, leaves[0].start, max(ends[row] for row in rows), shared) for rows, shared in groups]

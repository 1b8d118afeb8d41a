"""Which tokens at the ends of rows backward can leave out: padding, and responses whose advantage is zero.

A token adds nothing to any gradient if the loss sends exactly zero to its results and to those of all later tokens of
its row. That is known once the loss's gradients are there. A result that isn't finite counts as needed, because zero
times infinity is no number and eager would say so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from longstraw.runtime.layouts import Place
from longstraw.runtime.prefix_tree import Node


def ends(
    results: Sequence[Tensor], grads: Sequence[Tensor | None], places: Sequence[Place], num_rows: int, stop: int
) -> list[int]:
    """Return for each row where the last token ends that has to run again, 0 where none has to.

    Args:
        results: whole results.
        grads: their gradients; None for those without one.
        places: their layouts.
        num_rows: rows of the step.
        stop: where rows end: a result without a token dim needs all tokens.
    """
    found = torch.zeros(num_rows, dtype=torch.long)
    for result, grad, place in zip(results, grads, places, strict=True):
        if grad is None:
            continue
        needed = place.apart((grad != 0) | ~result.isfinite(), num_rows, place.stop - place.start)
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
    by_pages: dict[int, list[int]] = {}
    for leaf in leaves:
        rows = [row for row in leaf.rows if ends[row] > leaf.start]
        if leaf.shared or batch is None:
            groups += [(leaf.rows, leaf.shared)] if rows else []
            continue
        for row in rows:
            by_pages.setdefault(-(-(ends[row] - leaf.start) // page), []).append(row)
    for _, rows in sorted(by_pages.items()):
        assert batch is not None, "there are pages of rows that may be parted"
        size = batch(max(ends[row] for row in rows) - leaves[0].start)
        groups += [(rows[i : i + size], False) for i in range(0, len(rows), size)]
    return [Node(rows, leaves[0].start, max(ends[row] for row in rows), shared) for rows, shared in groups]

"""Which rows share which tokens.

A node covers a run of tokens of some rows that are equal in everything the model reads. Its children continue from its
last token. Rows that go separate ways are batched in leaves that run together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

CommonPrefix = Callable[[int, Sequence[int], int], list[int]]


@dataclass
class Node:
    """Tokens `start` to `stop` of `rows`.

    Attributes:
        shared: all rows are equal here and run as one; otherwise each row runs for itself, side by side.
    """

    rows: list[int]
    start: int
    stop: int
    shared: bool
    children: list[Node] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        """Rows that are run."""
        return 1 if self.shared else len(self.rows)

    @property
    def num_tokens(self) -> int:
        """Tokens that are run in this node and below, each row that runs for itself counted."""
        return (self.stop - self.start) * self.num_rows + sum(child.num_tokens for child in self.children)


def build(
    rows: Sequence[int], *, ends: Sequence[int], common: CommonPrefix, least: int, batch: Callable[[int], int]
) -> Node:
    """Return the tree of some rows.

    Args:
        rows: row numbers.
        ends: where the tokens of each row end that have to run; a row may run further where others share its tokens.
        common: `(row, rows, since) -> tokens that each of rows has in common with row, from the beginning`, where
            they are known to have `since` in common.
        least: a shared run shorter than this isn't split off (except at the beginning).
        batch: `tokens per row -> rows that run together`.
    """
    return _node(list(rows), 0, ends, common, least, batch)


def _node(
    rows: list[int], start: int, ends: Sequence[int], common: CommonPrefix, least: int, batch: Callable[[int], int]
) -> Node:
    stop = max(ends[row] for row in rows)
    shared = min(min(common(rows[0], rows, start)), stop)
    node = Node(rows, start, shared, shared=True)
    alone: list[int] = []
    left = [row for row in rows if ends[row] > shared]
    while left:
        lengths = common(left[0], left, shared)
        close = [row for row, length in zip(left, lengths, strict=True) if min(length, stop) - shared >= least]
        if len(close) > 1 and len(close) < len(rows):
            node.children.append(_node(close, shared, ends, common, least, batch))
        else:
            close = left[:1]
            alone += close
        left = [row for row in left if row not in close]
    for together in grouped(alone, ends, start=shared, page=least, batch=batch):
        node.children.append(Node(together, shared, max(ends[row] for row in together), shared=False))
    return node


def grouped(
    rows: Sequence[int], ends: Sequence[int], *, start: int, page: int, batch: Callable[[int], int]
) -> Iterator[list[int]]:
    """Yield rows that run together from a token on: none runs a page or more further than it has to.

    Args:
        rows: row numbers.
        ends: where the tokens of each row end that have to run.
        start: where they start.
        page: tokens of a page; rows that need as many pages run together.
        batch: `tokens per row -> rows that run together`.
    """
    by_pages: dict[int, list[int]] = {}
    for row in rows:
        by_pages.setdefault(-(-(ends[row] - start) // page), []).append(row)
    for _, alike in sorted(by_pages.items()):
        size = batch(max(ends[row] for row in alike) - start)
        yield from (alike[i : i + size] for i in range(0, len(alike), size))


def walk(node: Node) -> Iterator[Node]:
    """Yield a node and all below it."""
    yield node
    for child in node.children:
        yield from walk(child)


def shared_tokens(node: Node) -> int:
    """Return the most tokens on a way from a node to a leaf in nodes that run once for all their rows."""
    own = node.stop - node.start if node.shared else 0
    return own + max((shared_tokens(child) for child in node.children), default=0)


def split_at(node: Node, token: int) -> Node:
    """Return the tree with no node on both sides of a token."""
    node.children = [split_at(child, token) for child in node.children]
    if node.start < token < node.stop:
        rest = Node(node.rows, token, node.stop, node.shared, node.children)
        return Node(node.rows, node.start, token, node.shared, [rest])
    return node

"""Stores, what they keep, and the tree of shared prefixes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longstraw.errors import StateMisuse
from longstraw.runtime import prefix_tree
from longstraw.runtime.blocks import CausalBlocks
from longstraw.runtime.key_parts import KeyRange
from longstraw.runtime.prefix_tree import Node
from longstraw.runtime.state import Kept, Store, merged
from longstraw.runtime.tiers import Tier
from longstraw.runtime.visibility import first_seen
from longstraw.stages import Slot

SLOTS = (Slot("key", 2, 3, torch.float32, ""), Slot("value", 2, 5, torch.float32, ""))


def store(*runs: tuple[int, int], start: int = 0, stop: int = 10) -> Store:
    kept = merged(runs)
    return Store(
        SLOTS, (kept, kept), owner="the test", rows=1, start=start, stop=stop, tier=Tier("device", torch.device("cpu"))
    )


def values(lo: int, hi: int) -> list[torch.Tensor]:
    return [
        torch.arange(lo, hi, dtype=torch.float32).reshape(1, 1, -1, 1).expand(1, s.heads, hi - lo, s.width)
        for s in SLOTS
    ]


def parts(found: Store, until: int, since: int = 0) -> list[KeyRange]:
    return found.ranges(0, 1, since=since, until=until, reader=found)


def seen(found: Store, until: int, since: int = 0) -> list[float]:
    return [float(x) for part in parts(found, until, since) for x in part.key[0, 0, :, 0]]


def test_store_shows_what_was_appended_up_to_where_it_was_restored() -> None:
    s = store((0, 10))
    s.append(values(0, 4))
    s.append(values(4, 7))
    assert seen(s, 7) == [0, 1, 2, 3, 4, 5, 6]
    s.restore(4)
    assert seen(s, 4) == [0, 1, 2, 3]
    assert seen(s, 4, since=2) == [2, 3]
    with pytest.raises(StateMisuse, match="hidden"):
        seen(s, 5)
    s.restore(6)
    assert seen(s, 6) == [0, 1, 2, 3, 4, 5]


def test_store_keeps_only_what_it_is_told_to() -> None:
    s = store((2, 4), (6, 8))
    s.append(values(0, 4))
    s.append(values(4, 8))
    assert seen(s, 8) == [2, 3, 6, 7]
    assert [part.start for part in parts(s, 8)] == [2, 6]
    assert s.num_bytes == 4 * 2 * (3 + 5) * 4


def test_store_gradients_are_zero_for_tokens_not_kept() -> None:
    s = store((2, 4), (6, 8))
    s.append(values(0, 8))
    s.track_gradients(torch.float64)
    for part in parts(s, 8):
        part.key_grad.fill_(1.0)
    grad = s.gradients(1, 7)[0]
    assert grad.dtype == torch.float64
    assert grad[0, 0, :, 0].tolist() == [0, 1, 1, 0, 0, 1]


def test_store_gradients_of_kept_tokens_are_views() -> None:
    s = store((0, 8))
    s.append(values(0, 8))
    s.track_gradients(torch.float32)
    s.gradients(2, 5)[1].fill_(2.0)
    assert parts(s, 8)[0].value_grad[0, 0, :, 0].tolist() == [0, 0, 2, 2, 2, 0, 0, 0]


@pytest.mark.parametrize("use", ["ranges", "append", "release", "restore", "gradients"])
def test_store_refuses_use_after_release_and_names_its_owner(use: str) -> None:
    s = store((0, 10))
    s.release()
    uses = {
        "ranges": lambda: parts(s, 4),
        "append": lambda: s.append(values(0, 2)),
        "release": s.release,
        "restore": lambda: s.restore(0),
        "gradients": lambda: s.gradients(0, 2),
    }
    with pytest.raises(
        StateMisuse, match=r"Page 0 \(tokens 0 to 10\) of the transaction \(the test\).*released before"
    ):
        uses[use]()


def test_store_refuses_tokens_past_its_end_and_tokens_never_captured() -> None:
    s = store((0, 4), stop=4)
    with pytest.raises(StateMisuse, match="its room ends at 4"):
        s.append(values(0, 5))
    with pytest.raises(StateMisuse, match="tokens 0 to 0 were captured"):
        s.restore(2)


def test_merged_joins_neighbours() -> None:
    assert merged([(0, 2), (2, 4), (4, 4), (6, 7)]) == Kept(((0, 4), (6, 7)))
    assert merged([(0, 5), (2, 3), (4, 7), (8, 9)]) == Kept(((0, 7), (8, 9)))
    assert merged([(0, 4), (6, 9)]).overlaps(3, 8) == [(3, 4, 3), (6, 8, 4)]


class Window:
    """Sees the last `width` keys."""

    device = torch.device("cpu")

    def __init__(self, width: int) -> None:
        self.width = width

    def verdict(self, q0: int, q1: int, k0: int, k1: int) -> str:
        return "none" if k1 - 1 <= q0 - self.width or k0 >= q1 else "mixed"


@given(st.integers(1, 40), st.integers(0, 60), st.integers(1, 20))
def test_first_seen_is_the_first_key_of_the_window(width: int, start: int, count: int) -> None:
    assert first_seen(Window(width), start, start + count, 0, start) == max(0, start - width + 1)


def test_first_seen_of_causal_attention_is_the_beginning() -> None:
    assert first_seen(CausalBlocks(), 50, 60, 0, 50) == 0


# --- the prefix tree --------------------------------------------------------------------------------------------------


def tree(rows: list[list[int]], least: int = 1, batch: int = 2, ends: Sequence[int] | None = None) -> Node:
    def common(row: int, others: Sequence[int], since: int) -> list[int]:
        lengths = []
        for other in others:
            assert rows[row][:since] == rows[other][:since]
            pairs = zip(rows[row], rows[other], strict=True)
            lengths.append(next((i for i, (a, b) in enumerate(pairs) if a != b), len(rows[row])))
        return lengths

    ends = ends or [len(row) for row in rows]
    return prefix_tree.build(range(len(rows)), ends=ends, common=common, least=least, batch=lambda tokens: batch)


def covered(node: Node) -> dict[int, list[tuple[int, int]]]:
    found: dict[int, list[tuple[int, int]]] = {row: [(node.start, node.stop)] for row in node.rows}
    for child in node.children:
        for row, runs in covered(child).items():
            found[row] += runs
    return found


def test_build_shares_the_prompt_and_batches_the_responses() -> None:
    root = tree([[1, 1, 1, 2, 3], [1, 1, 1, 4, 5], [1, 1, 1, 6, 7]])
    assert (root.start, root.stop, root.shared) == (0, 3, True)
    assert [child.rows for child in root.children] == [[0, 1], [2]]


def test_build_finds_two_prompts() -> None:
    root = tree([[1, 1, 1, 2], [1, 1, 1, 3], [5, 5, 5, 2], [5, 5, 5, 3]])
    assert root.stop == 0 and [(c.rows, c.stop) for c in root.children] == [([0, 1], 3), ([2, 3], 3)]


def test_build_of_equal_rows_is_one_node() -> None:
    assert tree([[1, 2, 3]] * 4).children == []


def test_split_at_divides_what_crosses_a_token() -> None:
    root = prefix_tree.split_at(tree([[1, 1, 1, 2, 3], [1, 1, 1, 4, 5]]), 2)
    assert (root.stop, root.children[0].start, root.children[0].stop) == (2, 2, 3)
    assert root.children[0].children[0].rows == [0, 1]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=6, max_size=6), st.integers(1, 6)), min_size=1, max_size=7),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(0, 6),
)
def test_build_covers_every_row_to_its_end_and_shares_only_what_is_equal(
    rows_and_ends: list[tuple[list[int], int]], least: int, batch: int, at: int
) -> None:
    rows, ends = [row for row, _ in rows_and_ends], [end for _, end in rows_and_ends]
    root = prefix_tree.split_at(tree(rows, least, batch, ends), at)
    for row, runs in covered(root).items():
        cuts = [0]
        for start, stop in runs:
            assert start == cuts[-1], (row, runs)
            cuts.append(stop)
        assert cuts[-1] >= ends[row]
    stack = [root]
    while stack:
        node = stack.pop()
        stack += node.children
        if node.shared:
            assert all(rows[r][: node.stop] == rows[node.rows[0]][: node.stop] for r in node.rows)
            assert node.stop <= max(ends[r] for r in node.rows)
        elif not node.children:  # a page has `least` tokens
            assert all(node.stop < ends[r] + least for r in node.rows)
            assert len(node.rows) <= batch
        assert not (node.start < at < node.stop)

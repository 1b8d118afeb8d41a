"""The cheapest cut of a graph of values."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longstraw.passes.min_cut import min_cut


def cut(edges: dict[str, str], costs: dict[str, int], sources: str, sinks: str, **kwargs: object) -> str:
    found = min_cut(
        list(costs),
        users=lambda v: list(edges.get(v, "")),
        is_source=lambda v: v in sources,
        is_sink=lambda v: v in sinks,
        cost=costs.__getitem__,
        **kwargs,
    )
    return "".join(found)


def test_min_cut_takes_the_narrowest_value_of_a_chain() -> None:
    assert cut({"a": "b", "b": "c", "c": "d"}, {"a": 5, "b": 2, "c": 3, "d": 1}, "a", "d") == "b"


def test_min_cut_takes_two_values_where_no_single_one_separates() -> None:
    assert cut({"a": "bc", "b": "d", "c": "d"}, {"a": 9, "b": 2, "c": 3, "d": 1}, "a", "d") == "bc"


@pytest.mark.parametrize(("near_sink", "expected"), [(False, "a"), (True, "c")])
def test_min_cut_of_equal_cuts_takes_the_one_asked_for(near_sink: bool, expected: str) -> None:
    assert cut({"a": "b", "b": "c", "c": "d"}, dict.fromkeys("abcd", 4), "a", "d", near_sink=near_sink) == expected


def test_min_cut_may_cut_an_end_itself() -> None:
    assert cut({"a": "b"}, {"a": 5, "b": 1}, "a", "", is_end=lambda v: v == "b") == "b"


def test_min_cut_refuses_a_source_that_is_a_sink() -> None:
    with pytest.raises(ValueError, match="nothing can be cut"):
        cut({}, {"a": 1}, "a", "a")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=4, max_size=7), st.data())
def test_min_cut_is_the_cheapest_of_all_cuts(costs: list[int], data: st.DataObject) -> None:
    names = range(len(costs))
    edges = {a: [b for b in names if b > a and data.draw(st.booleans())] for a in names}
    goal = len(costs) - 1

    def reaches(removed: frozenset[int]) -> bool:
        stack, seen = ([0] if 0 not in removed else []), set()
        while stack:
            at = stack.pop()
            if at == goal:
                return True
            if at not in seen:
                seen.add(at)
                stack += [b for b in edges[at] if b not in removed]
        return False

    found = min_cut(
        names, users=edges.__getitem__, is_source=lambda v: v == 0, is_sink=lambda v: v == goal, cost=costs.__getitem__
    )
    assert not reaches(frozenset(found))
    choices = itertools.chain.from_iterable(itertools.combinations(range(goal), n) for n in range(goal + 1))
    assert sum(costs[v] for v in found) == min(sum(costs[v] for v in c) for c in choices if not reaches(frozenset(c)))

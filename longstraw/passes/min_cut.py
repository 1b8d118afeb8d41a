"""The cheapest set of values that separates one part of a graph from another."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

Value = TypeVar("Value")
_INFINITE = 1 << 62


def min_cut(
    values: Iterable[Value],
    *,
    users: Callable[[Value], Iterable[Value]],
    is_source: Callable[[Value], bool],
    is_sink: Callable[[Value], bool],
    cost: Callable[[Value], int],
    is_end: Callable[[Value], bool] = lambda _: False,
    near_sink: bool = False,
) -> list[Value]:
    """Return the cheapest set of values through which everything from sources to sinks passes.

    Each value is an edge (in, out) of its cost; uses are edges of infinite cost; a maximum flow (shortest augmenting
    paths, Edmonds and Karp 1972) gives the cut. Among equal cuts the one nearest to the sources (or to the sinks) is
    taken.

    Args:
        values: all values, in order; the result keeps this order.
        users: the values that read a value.
        is_source: values that need not be cut (they are on the source side, or may be cut at their own cost).
        is_sink: values that must lie behind the cut.
        is_end: values that must lie behind the cut or be cut themselves.
        cost: what it costs to cut at a value; at least 1.
        near_sink: which of several equal cuts to take.
    """
    order = list(values)
    known = set(order)
    capacity: dict[tuple[object, object], int] = {}
    neighbours: dict[object, list[object]] = {}

    def edge(a: object, b: object, size: int) -> None:
        for one, other in ((a, b), (b, a)):
            neighbours.setdefault(one, [])
            if (one, other) not in capacity:
                capacity[one, other] = 0
                neighbours[one].append(other)
        capacity[a, b] += size

    start, goal = ("start",), ("goal",)
    for value in order:
        edge((value, 0), (value, 1), _INFINITE if is_sink(value) else max(1, cost(value)))
        if is_source(value):
            edge(start, (value, 0), _INFINITE)
        if is_sink(value) or is_end(value):
            edge((value, 1), goal, _INFINITE)
        for user in users(value):
            if user in known:
                edge((value, 1), (user, 0), _INFINITE)

    def reach(origin: object, forward: bool) -> dict[object, object]:
        came: dict[object, object] = {origin: origin}
        queue = deque([origin])
        while queue:
            at = queue.popleft()
            for to in neighbours.get(at, ()):
                left = capacity[at, to] if forward else capacity[to, at]
                if left > 0 and to not in came:
                    came[to] = at
                    queue.append(to)
        return came

    while goal in (came := reach(start, True)):
        path: list[object] = [goal]
        while path[-1] != start:
            path.append(came[path[-1]])
        steps = list(zip(path[1:], path[:-1], strict=True))
        flow = min(capacity[step] for step in steps)
        if flow >= _INFINITE // 2:
            raise ValueError("a source is a sink: nothing can be cut")
        for a, b in steps:
            capacity[a, b] -= flow
            capacity[b, a] += flow
    if near_sink:
        behind = reach(goal, False)
        return [v for v in order if (v, 1) in behind and (v, 0) not in behind]
    before = reach(start, True)
    return [v for v in order if (v, 0) in before and (v, 1) not in before]

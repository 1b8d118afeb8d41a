"""How a step is cut: tokens of a span, rows of a batch, what keeps its graph, which boundary states are saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from longstraw.options import Options
from longstraw.runtime.prefix_tree import Node, shared_tokens, walk
from longstraw.stages import Stateful

_LONGEST_SPAN = 2048
"""Tokens of the longest span that is chosen where the options say "auto"."""
_SPAN_BYTES = 512 << 20
"""What the graph of a span may take."""
_BOUNDARY_BYTES = 256 << 20
"""What the boundary states saved for unwind may take before they are thinned."""


@dataclass(frozen=True)
class Shape:
    """What of a step's rows its plan depends on.

    Attributes:
        prompt: tokens before the first result that rows share.
        response: tokens of the longest run that only one row has.
        rows: rows of the step.
        results: tokens of a row that have results.
        shared: tokens of the longest way from the root of the prefix tree to a leaf, that one's not counted.
        scored: tokens with results of the longest run that rows share.
        whole: whether rows share all their tokens.
        kept: the part of the shared tokens whose state later tokens can see, by bytes.
    """

    prompt: int
    response: int
    rows: int
    results: int
    shared: int
    scored: int = 0
    whole: bool = False
    kept: float = 1.0

    @classmethod
    def of(cls, tree: Node, *, rows: int, results: tuple[int, int], kept: float) -> Shape:
        """Return what a prefix tree says.

        Args:
            tree: of all rows.
            rows: of the step.
            results: the first token with a result, and the one after the last.
            kept: as the attribute.
        """
        first, stop = results
        nodes = list(walk(tree))
        shared = [node for node in nodes if node.shared]
        return cls(
            prompt=min(shared_tokens(tree), first),
            response=max((node.stop - node.start for node in nodes if not node.shared), default=0),
            rows=rows,
            results=stop - first,
            shared=shared_tokens(tree),
            scored=max([0, *(node.stop - max(node.start, first) for node in shared)]),
            whole=not tree.children,
            kept=kept,
        )


@dataclass(frozen=True)
class Plan:
    """The numbers of one branch.

    Attributes:
        span_tokens: tokens of a row executed at once.
        replay_rows: rows of a batch of responses, or None: as many as `response_tokens` allow.
        saved_every: every how many-th boundary state is saved, or None: by what they take.
        boundary_bytes: what the boundary states of one row take.
        tier: where state rests.
    """

    span_tokens: int
    replay_rows: int | None
    saved_every: int | None
    boundary_bytes: int
    tier: str = "device"

    @classmethod
    def of(cls, branch: Stateful, options: Options) -> Plan:
        """Return the plan for a branch: what the options say, and what fits where they say "auto"."""
        fitting = _SPAN_BYTES // max(1, branch.graph_bytes_per_token)
        automatic = max(64, min(_LONGEST_SPAN, 1 << max(0, fitting.bit_length() - 1)))
        return cls(
            automatic if options.span_tokens == "auto" else options.span_tokens,
            None if options.replay_rows == "auto" else options.replay_rows,
            None if options.boundary_every == "auto" else options.boundary_every,
            sum(carry.num_bytes for carry in branch.carries),
            options.state_tier,
        )

    def describe(self) -> str:
        """Return the plan in words."""
        rows = (
            "as many responses at once as fit" if self.replay_rows is None else f"{self.replay_rows} responses at once"
        )
        every = f", every {self.saved_every}. boundary state saved" if (self.saved_every or 1) > 1 else ""
        return f"spans of {self.span_tokens} tokens, {rows}, state on tier {self.tier!r}{every}"

    @property
    def tail_tokens(self) -> int:
        """How many of the shared prompt's last tokens keep their graph from capture to unwind, at most."""
        return max(1, self.span_tokens // 4)

    @property
    def response_tokens(self) -> int:
        """How many tokens of responses have a graph at once: beside the tail, less than a span of the prompt."""
        return max(1, self.span_tokens // 2)

    def batch(self, tokens: int) -> int:
        """Return how many responses of so many tokens run together."""
        return self.replay_rows or max(1, self.response_tokens // max(1, tokens))

    def spans(self, node: Node, *, has_tail: bool) -> Sequence[tuple[int, int]]:
        """Return the spans of a node; with a tail, the last one has at most `tail_tokens`."""
        return self.cut(node.start, node.stop, has_tail=has_tail)

    def cut(self, start: int, stop: int, *, has_tail: bool) -> Sequence[tuple[int, int]]:
        """Return the spans of the tokens `start` to `stop`; with a tail, the last one has at most `tail_tokens`."""
        found: list[tuple[int, int]] = []
        tail = self.tail_tokens if has_tail else 0
        while start < stop:
            left = stop - start
            found.append((start, start + (min(self.span_tokens, left - tail) if left > tail else left)))
            start = found[-1][1]
        return found

    def boundary_every(self, num_spans: int, num_rows: int) -> int:
        """Return n: unwind finds the boundary states at every n-th span of a node, and computes those between again."""
        size = num_rows * self.boundary_bytes
        if self.saved_every is not None or num_spans * size <= _BOUNDARY_BYTES:
            return self.saved_every or 1
        best = round(num_spans**0.5)  # where num_spans / n + n is least
        return next((n for n in range(2, best) if (-(-num_spans // n) + n) * size <= _BOUNDARY_BYTES), best)

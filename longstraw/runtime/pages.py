"""Who has which captured state: a ledger of pages, without tensors.

    page        up to `page_tokens` tokens of all rows of one owner, in row coordinates; its number means these tokens
                for the whole step, also after they were released
    owner       the transaction, which has the prompt's pages, or a replay, which has those of what it appends
    run         tokens that need pages: those that no later token can see have none
    share       a reader holds pages of the owner that it continues from; nobody writes to these until it has released
    written     tokens that were appended; `shown` are those of them that may be read now

An owner's pages are one range of numbers, in the order of its tokens, so what is asked about many pages takes no longer
than about one. Every promise that is broken raises `StateMisuse` with the owner, the pages and their tokens.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

from longstraw.errors import StateMisuse


@dataclass(frozen=True, eq=False)
class Owner:
    """Who has pages. Two owners differ, even when they are called the same.

    Attributes:
        role: the transaction, or a replay.
        what: its rows and tokens, for messages.
    """

    role: Literal["transaction", "replay"]
    what: str

    def __str__(self) -> str:
        return f"the {self.role} ({self.what})"


class _Table:
    """Which pages cover which tokens.

    Args:
        runs: tokens that need pages: not empty, in order and apart.
        page_tokens: tokens of a page, at most; a page lies in one run.
        first: number of the first page.
    """

    def __init__(self, runs: Sequence[tuple[int, int]], page_tokens: int, first: int) -> None:
        self._runs, self._page_tokens = runs, page_tokens
        self._starts = [start for start, _ in runs]
        counts = [-(-(stop - start) // page_tokens) for start, stop in runs]
        self._firsts = list(accumulate(counts, initial=first))
        self.numbers = range(first, self._firsts[-1])

    def position(self, page: int) -> tuple[int, int]:
        """Return the first token of a page, and the one after its last."""
        run = bisect_right(self._firsts, page) - 1
        start, stop = self._runs[run]
        lo = start + (page - self._firsts[run]) * self._page_tokens
        return lo, min(lo + self._page_tokens, stop)

    def overlapping(self, lo: int, hi: int) -> range:
        """Return the pages that cover any of the tokens `lo` to `hi`."""
        return range(self._ended(lo), max(self._ended(lo), self.begun(hi)))

    def begun(self, token: int) -> int:
        """Return the page after the last one that begins before a token."""
        run = bisect_left(self._starts, token) - 1
        if run < 0:
            return self.numbers.start
        start, stop = self._runs[run]
        return self._firsts[run] - (start - min(token, stop)) // self._page_tokens

    def _ended(self, token: int) -> int:
        """Return the page after the last one that ends before a token or at it."""
        run = bisect_left(self._starts, token) - 1
        if run < 0:
            return self.numbers.start
        start, stop = self._runs[run]
        return self._firsts[run] + (token - start) // self._page_tokens if token < stop else self._firsts[run + 1]


@dataclass
class _Holding:
    """What one owner has.

    Attributes:
        owner: who.
        start, stop: tokens that it has room for.
        table: their pages.
        written, shown: tokens before these are.
        readers: who shares its pages, and up to which.
        sources: whose pages it shares.
        released: whether it has let go of all of them.
    """

    owner: Owner
    start: int
    stop: int
    table: _Table
    written: int
    shown: int
    readers: dict[Owner, int] = field(default_factory=dict)
    sources: list[_Holding] = field(default_factory=list)
    released: bool = False

    @property
    def outstanding(self) -> range:
        """The pages that the owner or a reader holds."""
        numbers = self.table.numbers
        return range(numbers.start, max(self.readers.values(), default=numbers.start)) if self.released else numbers

    def named(self, lo: int, hi: int) -> str:
        """Return the pages of the tokens `lo` to `hi`, in words."""
        pages = self.table.overlapping(lo, hi)
        if not pages:
            return f"tokens {lo} to {hi} (no page)"
        numbers = f"page {pages[0]}" if len(pages) == 1 else f"pages {pages[0]} to {pages[-1]}"
        return f"{numbers} (tokens {self.table.position(pages[0])[0]} to {self.table.position(pages[-1])[1]})"

    def refused(self, lo: int, hi: int, use: str, why: str) -> StateMisuse:
        """Return the error for a use of the tokens `lo` to `hi`."""
        named = self.named(lo, hi)
        return StateMisuse(f"{named[0].upper()}{named[1:]} of {self.owner} can't be {use}: {why}.")


class PagePool:
    """The pages of one branch in one step.

    Args:
        page_tokens: tokens of a page.
    """

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self._holdings: dict[Owner, _Holding] = {}
        self._firsts: list[int] = []  # of each owner that was given pages, in order
        self._given: list[_Holding] = []
        self._next = 0

    # --- changes ----------------------------------------------------------------------------------------------------

    def allocate(self, owner: Owner, start: int, stop: int, *, runs: Sequence[tuple[int, int]] | None = None) -> range:
        """Give an owner room for the tokens `start` to `stop`, none of them written; return its pages.

        Args:
            owner: it has none so far.
            start, stop: tokens, in row coordinates.
            runs: those of them that need pages, in order and apart; None stands for all.

        Raises:
            StateMisuse: the owner was given pages before.
        """
        if owner in self._holdings:
            raise self._holdings[owner].refused(start, stop, "allocated", "it was given pages before")
        table = _Table([(start, stop)] * (start < stop) if runs is None else runs, self.page_tokens, self._next)
        self._holdings[owner] = holding = _Holding(owner, start, stop, table, start, start)
        if table.numbers:
            self._firsts.append(table.numbers.start)
            self._given.append(holding)
        self._next = table.numbers.stop
        return table.numbers

    def extend(self, owner: Owner, count: int) -> tuple[int, int]:
        """Append tokens to what an owner has written, and show them; return the first, and the one after the last.

        Raises:
            StateMisuse: there is no room for them, a reader shares one of the pages, or earlier tokens are hidden.
        """
        holding = self._held(owner, "written")
        lo, hi = holding.written, holding.written + count
        if hi > holding.stop:
            raise holding.refused(max(lo, holding.stop), hi, "written", f"its room ends at {holding.stop}")
        if holding.shown < lo:
            raise holding.refused(lo, hi, "written", f"tokens {holding.shown} to {lo} are hidden")
        pages = holding.table.overlapping(lo, hi) if count else range(0)
        reader = next((reader for reader, end in holding.readers.items() if pages and end > pages[0]), None)
        if reader is not None:
            raise holding.refused(lo, min(hi, holding.table.position(pages[0])[1]), "written", f"{reader} reads it")
        holding.written = holding.shown = hi
        return lo, hi

    def show(self, owner: Owner, until: int) -> None:
        """Show what an owner has written before a token, and hide the rest.

        Raises:
            StateMisuse: not all of it was written.
        """
        holding = self._held(owner, "shown")
        captured = f"tokens {holding.start} to {holding.written} were captured"
        if until < holding.start:
            raise holding.refused(until, holding.start, "shown", captured)
        if until > holding.written:
            raise holding.refused(holding.written, until, "shown", captured)
        holding.shown = until

    def share(self, reader: Owner, owner: Owner) -> range:
        """Let a reader hold the pages that an owner shows; return them.

        Raises:
            StateMisuse: one of the two has released its pages, or was given none.
        """
        self._held(reader, "continued")
        holding = self._held(owner, f"shared with {reader}")
        shared = range(holding.table.numbers.start, holding.table.begun(holding.shown))
        holding.readers[reader] = max(shared.stop, holding.readers.get(reader, 0))
        self._holdings[reader].sources.append(holding)
        return shared

    def release(self, owner: Owner) -> None:
        """Let an owner go of its pages and of those it shares. A page is free when nobody holds it.

        Raises:
            StateMisuse: it has released them before, or was given none.
        """
        holding = self._held(owner, "released")
        holding.released = True
        for source in holding.sources:
            source.readers.pop(owner, None)

    # --- checks -----------------------------------------------------------------------------------------------------

    def check_held(self, owner: Owner, use: str) -> None:
        """Raise StateMisuse when an owner has released its pages; `use` is what can't be done with them."""
        self._held(owner, use)

    def check_read(self, reader: Owner, owner: Owner, lo: int, hi: int) -> None:
        """Check that a reader may read the tokens `lo` to `hi` of an owner.

        Raises:
            StateMisuse: the pages were released, are not written, are hidden, or the reader doesn't share them.
        """
        use = f"read by {reader}"
        self._held(reader, "continued")
        holding = self._held(owner, use)
        if hi > holding.written:
            raise holding.refused(max(lo, holding.written), hi, use, "not written yet")
        if hi > holding.shown:
            raise holding.refused(max(lo, holding.shown), hi, use, f"hidden, tokens up to {holding.shown} are shown")
        pages = holding.table.overlapping(lo, hi)
        if reader is not owner and pages and pages[-1] >= holding.readers.get(reader, 0):
            raise holding.refused(holding.table.position(pages[-1])[0], hi, use, "not shared with it")

    def check_released(self, when: str, *, but: Owner | None = None) -> None:
        """Check that every owner has released its pages, at the end of `when`, but one.

        Raises:
            StateMisuse: one has not, or still reads what its owner has released.
        """
        held = [h for h in self._holdings.values() if h.owner is not but and (h.outstanding or not h.released)]
        if not held:
            return
        first = held[0]
        stop = first.table.position(first.outstanding[-1])[1] if first.outstanding else first.stop
        why = f"{next(iter(first.readers))} still reads it" if first.released else "it was not released"
        more = "; others hold more" if len(held) > 1 else ""
        raise StateMisuse(f"The {when} leaves {first.named(first.start, stop)} of {first.owner}: {why}{more}.")

    def forget_released(self) -> None:
        """Let go of owners that have returned all their pages: for a pool that outlives many of them."""
        self._holdings = {owner: h for owner, h in self._holdings.items() if h.outstanding or not h.released}
        self._given = [holding for holding in self._given if holding.owner in self._holdings]
        self._firsts = [holding.table.numbers.start for holding in self._given]

    # --- questions --------------------------------------------------------------------------------------------------

    def pages_of(self, owner: Owner) -> range:
        """Return the pages that an owner was given, in the order of their tokens."""
        return self._holding(owner).table.numbers

    def owner_of(self, page: int) -> Owner:
        """Return who was given a page."""
        return self._of(page).owner

    def position_of(self, page: int) -> tuple[int, int]:
        """Return the first token of a page, and the one after its last, in row coordinates."""
        return self._of(page).table.position(page)

    def references(self, page: int) -> int:
        """Return how many hold a page: its owner and readers."""
        holding = self._of(page)
        return (not holding.released) + sum(end > page for end in holding.readers.values())

    @property
    def outstanding(self) -> int:
        """Number of pages that somebody holds."""
        return sum(len(holding.outstanding) for holding in self._holdings.values())

    def _of(self, page: int) -> _Holding:
        if not 0 <= page < self._next:
            raise StateMisuse(f"Page {page} was given to nobody: there are {self._next}.")
        at = bisect_right(self._firsts, page) - 1
        if at < 0 or page not in self._given[at].table.numbers:
            raise StateMisuse(f"Page {page} was released, and its owner forgotten.")
        return self._given[at]

    def _holding(self, owner: Owner) -> _Holding:
        if owner not in self._holdings:
            raise StateMisuse(f"No pages were given to {owner}.")
        return self._holdings[owner]

    def _held(self, owner: Owner, use: str) -> _Holding:
        holding = self._holding(owner)
        if holding.released:
            raise holding.refused(holding.start, holding.stop, use, "released before")
        return holding

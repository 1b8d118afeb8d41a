"""The ledger of pages: against a model that counts one page at a time, and every message that it raises."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)
from torch import Tensor

from longstraw.errors import StateMisuse
from longstraw.runtime import transaction
from longstraw.runtime.pages import Owner, PagePool
from longstraw.runtime.transaction import BranchRun
from tests.small import Tiny, inputs, step
from tests.test_transactions import OPTIONS, Interrupting


def prompt(what: str = "the prompt") -> Owner:
    return Owner("transaction", what)


def response(what: str = "a response") -> Owner:
    return Owner("replay", what)


# --- against a model --------------------------------------------------------------------------------------------------


@dataclass
class Known:
    """What a model knows of an owner: `pages` maps page numbers to tokens; `reads` holds pages of others."""

    start: int
    stop: int
    pages: dict[int, list[int]]
    written: list[int] = field(default_factory=list)
    hidden: set[int] = field(default_factory=set)
    reads: set[int] = field(default_factory=set)
    released: bool = False


def pages_one_by_one(runs: list[tuple[int, int]], page_tokens: int) -> Iterator[list[int]]:
    for start, stop in runs:
        for lo in range(start, stop, page_tokens):
            yield [token for token in range(lo, lo + page_tokens) if token < stop]


class Machine(RuleBasedStateMachine):
    """Uses a pool at random: it refuses exactly what the model refuses, and answers as the model does."""

    owners = Bundle("owners")
    lengths = st.lists(st.integers(0, 5), min_size=1, max_size=5)

    @initialize(target=owners, page_tokens=st.integers(1, 4), first=lengths, second=lengths)
    def begin(self, page_tokens: int, first: list[int], second: list[int]) -> Any:
        self.pool = PagePool(page_tokens)
        self.known: dict[Owner, Known] = {}
        self.given: list[Owner] = []
        return multiple(self.allocate_runs(0, [6, *first]), self.allocate_runs(2, [5, *second]))

    def agrees(self, is_right: bool, use: Any, *args: Any) -> Any:
        """Return what a use of the pool returns; it must raise exactly when it isn't right."""
        if is_right:
            return use(*args)
        with pytest.raises(StateMisuse):
            use(*args)

    def holders(self, page: int) -> int:
        owner = self.known[self.given[page]]
        return (not owner.released) + sum(page in k.reads and not k.released for k in self.known.values())

    @precondition(lambda self: len(self.known) < 6)
    @rule(target=owners, start=st.integers(0, 3), cuts=lengths)
    def allocate(self, start: int, cuts: list[int]) -> Owner:
        return self.allocate_runs(start, cuts)

    def allocate_runs(self, start: int, cuts: list[int]) -> Owner:
        """Give a new owner runs of tokens that need pages and others that need none, by turns."""
        ends = [start]
        for cut in cuts:
            ends.append(ends[-1] + cut)
        runs = [(a, b) for a, b in zip(ends[::2], ends[1::2], strict=False) if a < b]
        apart = [run for i, run in enumerate(runs) if i == 0 or runs[i - 1][1] < run[0]]
        owner = (prompt if not self.known else response)(f"owner {len(self.known)}")
        numbers = self.pool.allocate(owner, start, ends[-1], runs=apart)
        tokens = list(pages_one_by_one(apart, self.pool.page_tokens))
        assert list(numbers) == list(range(len(self.given), len(self.given) + len(tokens)))
        self.given += [owner] * len(tokens)
        self.known[owner] = Known(start, ends[-1], dict(zip(numbers, tokens, strict=True)))
        return owner

    @rule(owner=owners)
    def allocate_again(self, owner: Owner) -> None:
        self.agrees(False, self.pool.allocate, owner, 0, 4)

    @rule(owner=owners, count=st.integers(0, 5))
    def extend(self, owner: Owner, count: int) -> None:
        known = self.known[owner]
        lo = known.start + len(known.written)
        new = list(range(lo, lo + count))
        shared = any(set(new) & set(tokens) and self.holders(page) > 1 for page, tokens in known.pages.items())
        is_right = not known.released and lo + count <= known.stop and not known.hidden and not shared
        if self.agrees(is_right, self.pool.extend, owner, count) is not None:
            known.written += new

    @rule(owner=owners, back=st.integers(-1, 6))
    def show(self, owner: Owner, back: int) -> None:
        known = self.known[owner]
        until = known.start + len(known.written) - back
        is_right = not known.released and known.start <= until <= known.start + len(known.written)
        self.agrees(is_right, self.pool.show, owner, until)
        if is_right:
            known.hidden = {token for token in known.written if token >= until}

    @rule(reader=owners, owner=owners)
    def share(self, reader: Owner, owner: Owner) -> None:
        if reader is owner:
            return
        known, other = self.known[owner], self.known[reader]
        shown = set(known.written) - known.hidden
        if self.agrees(not known.released and not other.released, self.pool.share, reader, owner) is not None:
            other.reads |= {page for page, tokens in known.pages.items() if shown & set(tokens)}

    @rule(reader=owners, owner=owners, skip=st.integers(0, 12), count=st.integers(1, 9))
    def read(self, reader: Owner, owner: Owner, skip: int, count: int) -> None:
        known, other = self.known[owner], self.known[reader]
        lo = known.start + skip
        wanted = set(range(lo, min(lo + count, known.stop)))
        if not wanted:
            return
        pages = {page for page, tokens in known.pages.items() if wanted & set(tokens)}
        is_right = not known.released and not other.released and wanted <= set(known.written) - known.hidden
        is_right &= reader is owner or pages <= other.reads
        self.agrees(is_right, self.pool.check_read, reader, owner, min(wanted), max(wanted) + 1)

    @rule(owner=owners, meant=st.sampled_from([True, False, False]))
    def release(self, owner: Owner, meant: bool) -> None:
        known = self.known[owner]
        if meant or known.released:
            self.agrees(not known.released, self.pool.release, owner)
            known.released = True

    @invariant()
    def agrees_on_every_page(self) -> None:
        for page, owner in enumerate(self.given):
            tokens = self.known[owner].pages[page]
            assert self.pool.owner_of(page) is owner and page in self.pool.pages_of(owner)
            assert self.pool.position_of(page) == (tokens[0], tokens[-1] + 1)
            assert self.pool.references(page) == self.holders(page)

    @invariant()
    def agrees_on_what_is_outstanding(self) -> None:
        held = sum(self.holders(page) > 0 for page in range(len(self.given)))
        assert self.pool.outstanding == held
        self.agrees(not held and all(k.released for k in self.known.values()), self.pool.check_released, "step")


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


# --- messages ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def pool() -> PagePool:
    return PagePool(4)


@pytest.fixture
def parent(pool: PagePool) -> Owner:
    """Has the pages 0 (tokens 0 to 4), 1 (4 to 8) and 2 (8 to 10), of which tokens 0 to 6 are written."""
    owner = prompt()
    pool.allocate(owner, 0, 10)
    pool.extend(owner, 6)
    return owner


@pytest.fixture
def child(pool: PagePool, parent: Owner) -> Owner:
    """Has page 3 (tokens 10 to 12), not written, and shares pages 0 and 1."""
    owner = response()
    pool.allocate(owner, 10, 12)
    pool.share(owner, parent)
    return owner


def refuses(text: str) -> Any:
    return pytest.raises(StateMisuse, match=f"^{re.escape(text)}$")


PARENT, CHILD = "the transaction (the prompt)", "the replay (a response)"


def test_pages_are_in_order_and_know_their_tokens(pool: PagePool, parent: Owner, child: Owner) -> None:
    assert pool.pages_of(parent) == range(0, 3)
    assert [pool.position_of(page) for page in pool.pages_of(parent)] == [(0, 4), (4, 8), (8, 10)]
    assert pool.owner_of(2) is parent and pool.owner_of(3) is child
    assert [pool.references(page) for page in range(4)] == [2, 2, 1, 1]
    assert pool.outstanding == 4


def test_tokens_that_nobody_will_see_have_no_page(pool: PagePool) -> None:
    owner = prompt()
    assert pool.allocate(owner, 0, 100, runs=[(3, 5), (40, 46)]) == range(3)
    assert [pool.position_of(page) for page in range(3)] == [(3, 5), (40, 44), (44, 46)]
    pool.extend(owner, 45)
    pool.check_read(owner, owner, 10, 30)
    with refuses(f"Page 2 (tokens 44 to 46) of {PARENT} can't be read by {PARENT}: not written yet."):
        pool.check_read(owner, owner, 0, 46)


def test_a_long_prompt_takes_no_longer_than_a_short_one() -> None:
    pool, owner = PagePool(1), prompt()
    pool.allocate(owner, 0, 10**12)
    pool.extend(owner, 10**11)
    pool.show(owner, 10**10)
    assert pool.outstanding == 10**12 and pool.position_of(10**11) == (10**11, 10**11 + 1)


def test_release_twice_is_refused(pool: PagePool, parent: Owner) -> None:
    pool.release(parent)
    with refuses(f"Pages 0 to 2 (tokens 0 to 10) of {PARENT} can't be released: released before."):
        pool.release(parent)


def test_pages_left_at_the_end_are_a_leak(pool: PagePool, parent: Owner, child: Owner) -> None:
    pool.release(child)
    pool.check_released("forward", but=parent)
    with refuses(f"The forward leaves pages 0 to 2 (tokens 0 to 10) of {PARENT}: it was not released."):
        pool.check_released("forward")
    pool.release(parent)
    pool.check_released("forward")


def test_a_leak_says_when_there_are_others(pool: PagePool, parent: Owner, child: Owner) -> None:
    with refuses(
        f"The backward leaves pages 0 to 2 (tokens 0 to 10) of {PARENT}: it was not released; others hold more."
    ):
        pool.check_released("backward")


def test_pages_that_a_reader_still_holds_are_a_leak(pool: PagePool, parent: Owner, child: Owner) -> None:
    pool.release(parent)
    assert pool.outstanding == 3
    with refuses(f"The backward leaves pages 0 to 1 (tokens 0 to 8) of {PARENT}: {CHILD} still reads it."):
        pool.check_released("backward", but=child)


def test_a_page_that_others_read_is_not_written_to(pool: PagePool, parent: Owner, child: Owner) -> None:
    with refuses(f"Page 1 (tokens 4 to 8) of {PARENT} can't be written: {CHILD} reads it."):
        pool.extend(parent, 3)
    pool.release(child)
    assert pool.extend(parent, 3) == (6, 9)


def test_tokens_past_the_room_are_refused(pool: PagePool, parent: Owner) -> None:
    with refuses(f"Tokens 10 to 12 (no page) of {PARENT} can't be written: its room ends at 10."):
        pool.extend(parent, 6)


def test_tokens_after_hidden_ones_are_not_written(pool: PagePool, parent: Owner) -> None:
    pool.show(parent, 3)
    with refuses(f"Page 1 (tokens 4 to 8) of {PARENT} can't be written: tokens 3 to 6 are hidden."):
        pool.extend(parent, 1)


def test_state_that_is_not_written_is_not_read(pool: PagePool, parent: Owner) -> None:
    with refuses(f"Pages 1 to 2 (tokens 4 to 10) of {PARENT} can't be read by {PARENT}: not written yet."):
        pool.check_read(parent, parent, 0, 9)


def test_hidden_state_is_not_read_until_it_is_shown_again(pool: PagePool, parent: Owner, child: Owner) -> None:
    pool.show(parent, 4)
    with refuses(f"Page 1 (tokens 4 to 8) of {PARENT} can't be read by {CHILD}: hidden, tokens up to 4 are shown."):
        pool.check_read(child, parent, 2, 6)
    pool.show(parent, 6)
    pool.check_read(child, parent, 2, 6)


def test_released_state_is_not_read(pool: PagePool, parent: Owner, child: Owner) -> None:
    pool.release(parent)
    with refuses(f"Pages 0 to 2 (tokens 0 to 10) of {PARENT} can't be read by {CHILD}: released before."):
        pool.check_read(child, parent, 0, 4)


def test_only_who_shares_a_page_reads_it(pool: PagePool, parent: Owner, child: Owner) -> None:
    stranger = response("another")
    pool.allocate(stranger, 10, 12)
    with refuses(f"Page 1 (tokens 4 to 8) of {PARENT} can't be read by the replay (another): not shared with it."):
        pool.check_read(stranger, parent, 0, 6)
    pool.release(child)
    with refuses(f"Page 3 (tokens 10 to 12) of {CHILD} can't be continued: released before."):
        pool.check_read(child, parent, 0, 4)


@pytest.mark.parametrize("until", [-1, 7])
def test_only_what_was_written_is_shown(pool: PagePool, parent: Owner, until: int) -> None:
    named = "Tokens -1 to 0 (no page)" if until < 0 else "Page 1 (tokens 4 to 8)"
    with refuses(f"{named} of {PARENT} can't be shown: tokens 0 to 6 were captured."):
        pool.show(parent, until)


def test_released_pages_are_not_shared(pool: PagePool, parent: Owner) -> None:
    pool.release(parent)
    reader = response()
    pool.allocate(reader, 10, 12)
    with refuses(f"Pages 0 to 2 (tokens 0 to 10) of {PARENT} can't be shared with {CHILD}: released before."):
        pool.share(reader, parent)


def test_an_owner_is_given_pages_once(pool: PagePool, parent: Owner) -> None:
    with refuses(f"Pages 0 to 2 (tokens 0 to 10) of {PARENT} can't be allocated: it was given pages before."):
        pool.allocate(parent, 0, 10)
    pool.allocate(prompt(), 0, 10)  # another, of the same name


def test_who_was_given_nothing_has_nothing(pool: PagePool, parent: Owner) -> None:
    with refuses(f"No pages were given to {CHILD}."):
        pool.release(response())
    with refuses("Page 3 was given to nobody: there are 3."):
        pool.owner_of(3)


# --- steps ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def run() -> Callable[[], Tensor]:
    """A compiled step of three responses to a prompt; returns its loss."""
    model, given = Tiny(), inputs(prompt=11, response=6)
    compiled = torch.compile(step, backend="longstraw", options=OPTIONS)
    return lambda: compiled(model, *given)


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[PagePool]:
    """Every pool of the steps to come."""
    found: list[PagePool] = []

    def made(page_tokens: int) -> PagePool:
        found.append(PagePool(page_tokens))
        return found[-1]

    monkeypatch.setattr(transaction, "PagePool", made)
    return found


@contextlib.contextmanager
def interrupted(phase: str, at: int | None) -> Iterator[Interrupting]:
    """Let the forward or the backward of branches fail at one operator, or count these."""
    mode, function = Interrupting(at, RuntimeError), getattr(BranchRun, phase)

    def under_mode(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return function(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BranchRun, phase, under_mode)
        yield mode


def test_a_step_and_an_interrupted_step_leave_no_page(run: Callable[[], Tensor], pools: list[PagePool]) -> None:
    loss = run()
    kept = pools[0].pages_of(pools[0].owner_of(0))
    assert pools[0].outstanding == len(kept) == 5  # the prompt's
    loss.backward()
    assert pools[0].outstanding == 0
    for phase in ("forward", "backward"):
        with interrupted(phase, None) as count:
            run().backward()
        assert count.count > 100
        for at in range(1, count.count, count.count // 3):
            with pytest.raises(RuntimeError, match="on purpose"), interrupted(phase, at):
                run().backward()
    assert len(pools) > 5 and not any(pool.outstanding for pool in pools)


def test_a_pool_that_is_kept_forgets_who_returned_all_pages() -> None:
    pool, prompt = PagePool(4), Owner("transaction", "the prompt")
    pool.allocate(prompt, 0, 10)
    pool.extend(prompt, 10)
    for number in range(3):
        replay = Owner("replay", f"response {number}")
        pool.allocate(replay, 10, 15)
        pool.share(replay, prompt)
        pool.release(replay)
        pool.forget_released()
        with pytest.raises(StateMisuse, match="No pages were given to the replay"):
            pool.pages_of(replay)
        with pytest.raises(StateMisuse, match=rf"Page {3 + 2 * number} was released"):
            pool.position_of(3 + 2 * number)
    assert list(pool.pages_of(prompt)) == [0, 1, 2]
    assert all(pool.owner_of(page) is prompt for page in range(3))
    assert pool.outstanding == 3


def test_a_leak_is_an_error_that_masks_no_other(
    run: Callable[[], Tensor], pools: list[PagePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.no_grad():
        run()
        assert pools[0].outstanding == 0
        monkeypatch.setattr(transaction.Store, "release", lambda store: None)
        with pytest.raises(StateMisuse, match=r"The forward leaves pages 0 to 4 .* of the transaction .*; others"):
            run()
        with pytest.raises(RuntimeError, match="on purpose"), interrupted("forward", 60):
            run()
    assert pools[-1].outstanding

"""A bar over the tokens of a step's spans."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from longstraw.errors import MissingExtra

Advance = Callable[[int], object]
"""Called with the number of tokens that are done."""


def unseen(_: int) -> None:
    """Progress that nobody watches."""


@contextlib.contextmanager
def bar(what: str, tokens: int, *, shown: bool) -> Iterator[Advance]:
    """Show a bar for as long as the block runs, if `shown`; yield what moves it."""
    if not shown:
        yield unseen
        return
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise MissingExtra("progress=True needs tqdm.", remedy="pip install 'longstraw[progress]'") from error
    with tqdm(total=tokens, desc=what, unit="tokens", leave=False) as shown_bar:
        yield shown_bar.update

"""What happens when the device is out of memory: a branch's phase runs once more, from its beginning, with shorter
spans; before the first span, the step is refused.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from longstraw.errors import OutOfMemory

Result = TypeVar("Result")

_LOGGER = logging.getLogger("longstraw")


@contextlib.contextmanager
def refused_if_full() -> Iterator[None]:
    """Refuse a step whose inputs leave the device no room for what is computed of them before any span runs.

    Raises:
        OutOfMemory: its memory is full.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            "The device's memory is full before the first span runs: what is computed for all rows and tokens at once, "
            "such as positions and parts of masks, doesn't fit beside the weights and the step's inputs.",
            remedy="Give fewer rows or shorter ones, and no input that is larger than a number for each token, such as "
            "a mask of pairs of tokens.",
        ) from error


class Shorter:
    """Spans may be halved once in a step.

    Args:
        tell: given the tokens of the shorter spans, for later steps.

    Attributes:
        used: whether they were halved.
    """

    def __init__(self, tell: Callable[[int], None]) -> None:
        self._tell = tell
        self.used = False

    def once_more_if_full(
        self, run: Callable[[], Result], halve: Callable[[], int], describe: Callable[[], str]
    ) -> Result:
        """Run a phase, and once more if the device's memory is full.

        Args:
            run: the phase, from its beginning.
            halve: lets go of what the phase has left and cuts spans in half; returns their tokens.
            describe: says how the step is cut.

        Raises:
            OutOfMemory: it is full with the shorter spans, too.
        """
        try:
            return run()
        except torch.OutOfMemoryError as error:
            if self.used:
                raise OutOfMemory(
                    f"The device's memory is full, also with {describe()}.",
                    remedy="Give memory_budget, which plans a step to fit or says what it takes at least; or "
                    "span_tokens, replay_rows=1, and another state_tier.",
                ) from error
            reason = str(error).splitlines()[0]
        self.used = True  # outside of the handler: the error's frames hold tensors

        def shorter() -> Result:
            tokens = halve()
            self._tell(tokens)
            _LOGGER.warning("out of memory (%s): spans of %d tokens from here on", reason, tokens)
            return run()

        return self.once_more_if_full(shorter, halve, describe)

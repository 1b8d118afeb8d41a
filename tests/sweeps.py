"""Parameters of which a few run always, and all in the slow run (`pytest -m "slow or not slow"`)."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def sweep(values: Iterable[Any], *, always: Container[Any]) -> list[Any]:
    """Mark the values that aren't among `always` as slow; tuples are several parameters."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=() if value in always else pytest.mark.slow
        )
        for value in values
    ]

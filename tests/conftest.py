"""What every test shares: two threads, and a Dynamo that remembers nothing of the test before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


def pytest_configure() -> None:
    torch.set_num_threads(2)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Compile from scratch in each test, and leave nothing for the next."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()

"""What every test shares: few threads, and a Dynamo that remembers nothing of the test before."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch


def pytest_configure() -> None:
    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)  # the workers share the cores
    # Models of two layers compile faster without: with symbolic sizes a new entry costs more than a few hits save.
    torch._dynamo.config.fake_tensor_cache_enabled = False


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Compile from scratch in each test, and leave nothing for the next."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()

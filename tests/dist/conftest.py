"""One pool of processes for all multi-process tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Processes that run a function on every rank."""
    pool = RankPool()
    yield pool
    pool.close()

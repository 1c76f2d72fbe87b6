from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.engine.forked_ranks import forked_ranks


@pytest.fixture(scope="session", autouse=True)
def _fork_ranks() -> Iterator[None]:
    with forked_ranks():
        yield

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.threads import computing_threads


@pytest.fixture(scope="session", autouse=True)
def _one_thread_computes() -> Iterator[None]:
    """The default for every test, because parallel test runs share the machine's cores."""
    with computing_threads(1):
        yield

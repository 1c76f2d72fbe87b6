from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from kernels.device import IS_INTERPRETED
from tests.support.kernels.compile_template import forked_compilers
from tests.support.threads import computing_threads


@pytest.fixture(scope="session", autouse=True)
def _one_thread_computes() -> Iterator[None]:
    """The default for every test, because parallel test runs share the machine's cores."""
    with computing_threads(1):
        yield


@pytest.fixture(scope="session", autouse=True)
def _fork_compilers() -> Iterator[None]:
    with nullcontext() if IS_INTERPRETED else forked_compilers():
        yield

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from kernels.device import IS_INTERPRETED
from tests.support.kernels.compile_template import forked_compilers
from tests.support.threads import computing_threads


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """CPU kernels of float16 only compile in long runs: 35 s for a dtype that no model has."""
    for item in items:
        call = getattr(item, "callspec", None)
        if call is None or call.params.get("dtype") is not torch.float16:
            continue
        if "Compiled" in call.id or item.path.name == "test_cpu_attention.py":
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session", autouse=True)
def _use_one_thread() -> Iterator[None]:
    """Uses one thread unless a test sets another number: test runs share a machine's cores."""
    with computing_threads(1):
        yield


@pytest.fixture(scope="session", autouse=True)
def _fork_compilers() -> Iterator[None]:
    with nullcontext() if IS_INTERPRETED else forked_compilers():
        yield


@pytest.fixture(autouse=True)
def _seed_random_numbers() -> None:
    """Makes random numbers, and so tolerance checks, independent of the order of tests."""
    torch.manual_seed(0)

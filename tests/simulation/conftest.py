from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _frozen_heap() -> Iterator[None]:
    """Excludes objects that exist before a test from garbage collection.

    Each schedule ends with a full collection; traversing torch's heap made it four times slower.
    """
    gc.freeze()
    yield
    gc.unfreeze()

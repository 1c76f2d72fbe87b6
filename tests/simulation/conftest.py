from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _frozen_heap() -> Iterator[None]:
    """Collections skip the objects that exist before a test.

    Each schedule ends with a full collection; walking torch's heap made it four times slower.
    """
    gc.freeze()
    yield
    gc.unfreeze()

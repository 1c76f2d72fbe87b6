"""How much is tried in a test run: the same examples each time, so that its colour is for good.

`scripts/fuzz` runs the same tests for as long as it is told, guided by coverage where it can be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings


def fuzz(max_examples: int) -> Callable[[Any], Any]:
    return settings(
        max_examples=max_examples,
        derandomize=True,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )

"""The number of examples in a test run: the same ones each time, so that results are reproducible.

`scripts/fuzz` runs the same tests for a given time, guided by coverage if possible.
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


def timed(test: Any) -> Any:
    """Marks a test of CPU time, which a run guided by coverage would multiply."""
    test.is_timed = True
    return test

"""The seconds of the stages of a process's start, for its log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shared.clock import MonotonicClock

LEAST_S = 0.001  # shorter stages are not told


class StageTimes:
    """Seconds by stage, in the order of their ends. A stage that runs again adds to its time.

    Stages of several threads may overlap.
    """

    def __init__(self) -> None:
        self._clock = MonotonicClock()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        began_at = self._clock.now()
        try:
            yield
        finally:
            self.add(name, self._clock.now() - began_at)

    def add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def fields(self) -> dict[str, float]:
        """Returns the fields of a log event: NAME_s for each stage of a millisecond or more."""
        told = {name: each for name, each in self._seconds.items() if each >= LEAST_S}
        return {f"{name}_s": round(each, 3) for name, each in told.items()}

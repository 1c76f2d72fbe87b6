from __future__ import annotations

from structlog.testing import capture_logs

from shared.engine.memory_shortage import LOG_APART_S, MemoryShortage
from shared.errors import OutOfMemory


class Clock:
    time = 0.0

    def now(self) -> float:
        return self.time


def test_shortage_is_counted_always_and_logged_once_in_a_while() -> None:
    clock = Clock()
    shortage = MemoryShortage(clock)  # type: ignore[arg-type]
    with capture_logs() as logs:
        for _ in range(5):
            shortage.record(OutOfMemory("tried 2 GiB"), num_tokens=7)
        clock.time = LOG_APART_S
        shortage.record(OutOfMemory("tried 1 GiB"))
    assert shortage.num == 6
    assert [(each["reason"], each["num_since"]) for each in logs] == [
        ("tried 2 GiB", 1),
        ("tried 1 GiB", 5),
    ]

from __future__ import annotations

from services.scheduler.silent_workers import FIRST_CLOSED_S, SilentWorkers


def silences(silent: SilentWorkers, *times: float) -> list[float | None]:
    """Starts that fail one after the other, each 0.1 s after it was sent."""
    return [silent.record("w", now - 0.1, now) for now in times]


def test_third_silent_start_in_a_row_closes_a_worker() -> None:
    silent = SilentWorkers()
    assert silences(silent, 0.0, 1.0, 2.0) == [None, None, FIRST_CLOSED_S]
    assert silent.closed(2.0 + FIRST_CLOSED_S - 0.01) == {"w"}
    assert silent.closed(2.0 + FIRST_CLOSED_S) == set()
    assert silent.silent() == {"w"}


def test_any_reply_opens_a_worker_and_starts_the_count_again() -> None:
    silent = SilentWorkers()
    silences(silent, 0.0, 1.0, 2.0)
    silent.forget("w")
    assert silent.closed(2.1) == silent.silent() == set()
    assert silences(silent, 3.0, 4.0) == [None, None]
    silent.forget("w")
    assert silences(silent, 5.0) == [None]


def test_each_further_silent_start_closes_it_for_twice_as_long() -> None:
    silent = SilentWorkers()
    assert silences(silent, 0.0, 1.0, 2.0, 5.0, 11.0, 22.0) == [None, None, 2.5, 5.0, 10.0, 10.0]


def test_starts_sent_together_count_once() -> None:
    silent = SilentWorkers()
    assert [silent.record("w", 0.0, 0.1 + 0.01 * n) for n in range(9)] == [None] * 9
    assert silent.closed(0.2) == set()

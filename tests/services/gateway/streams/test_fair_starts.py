"""Requests that wait to start: by turns of their senders, a few in each turn of the loop."""

from __future__ import annotations

from collections.abc import Callable

from services.gateway.streams.fair_starts import FairStarts

ONE, OTHER = ("tenant", "one"), ("tenant", "other")


class Loop:
    def __init__(self) -> None:
        self.soon: list[Callable[[], None]] = []
        self.started: list[str] = []
        self.starts = FairStarts(self.soon.append, max_per_turn=2)

    def arrive(self, holder: tuple[str, str], number: int) -> None:
        self.starts.start(holder, lambda: self.started.append(f"{holder[1]} {number}"))

    def turn(self) -> list[str]:
        """Returns what has started since the last turn."""
        called, self.soon[:] = list(self.soon), []
        for each in called:
            each()
        started, self.started = self.started, []
        return started


def test_few_requests_start_at_once() -> None:
    loop = Loop()
    for number in range(2):
        loop.arrive(ONE, number)
    assert loop.started == ["one 0", "one 1"]
    assert loop.turn() == ["one 0", "one 1"]
    assert loop.soon == []
    loop.arrive(ONE, 2)
    assert loop.started == ["one 2"]


def test_a_burst_leaves_room_for_others_in_each_turn() -> None:
    loop = Loop()
    for number in range(100):
        loop.arrive(ONE, number)
    loop.arrive(OTHER, 0)
    assert loop.turn() == ["one 0", "one 1", "one 2", "other 0"]
    assert loop.turn() == ["one 3", "one 4"]
    loop.arrive(OTHER, 1)
    loop.arrive(OTHER, 2)
    assert loop.turn() == ["one 5", "other 1"]
    assert loop.turn() == ["one 6", "other 2"]


def test_every_request_starts_once_and_in_its_sender_s_order() -> None:
    loop = Loop()
    for number in range(9):
        loop.arrive(ONE if number % 3 else OTHER, number)
    started = [name for _ in range(10) for name in loop.turn()]
    assert started.sort(key=lambda name: name.split()[0]) is None
    assert started == [
        *(f"one {number}" for number in (1, 2, 4, 5, 7, 8)),
        *(f"other {number}" for number in (0, 3, 6)),
    ]
    assert loop.soon == []

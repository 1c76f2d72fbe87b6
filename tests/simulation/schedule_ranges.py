"""Which seeds the test files share between them, in pieces of a few seconds."""

from __future__ import annotations

from tests.simulation.sweep import report_of, run_seeds

NUM_FILES = 2
NUM_PIECES = 12  # a file
PIECE = 100  # schedules


def pieces_of(file_index: int) -> list[range]:
    first = file_index * NUM_PIECES * PIECE
    starts = range(first, first + NUM_PIECES * PIECE, PIECE)
    return [range(start, start + PIECE) for start in starts]


def check(seeds: range) -> None:
    failed = run_seeds(seeds).failed
    assert not failed, "\n" + "\n".join(report_of(outcome) for outcome in failed)

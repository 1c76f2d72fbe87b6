"""The operations whose output bits differ between two runs of the exact mode.

Inputs are seeded, so the bits change with the kernels alone: two commits, or two cards that should
agree, are compared without running either again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from benchmarks.gpu_results.runs import Row, Run, newest

Key = tuple[str, str]  # case and shape


def changes(run: Run, runs: Iterable[Run]) -> list[str]:
    """Returns a line for each output whose bits differ from those of the newest run of another
    commit on this card, or of another card.
    """
    others = [other for other in runs if other.name != run.name]
    same_card = [other for other in others if other.card == run.card]
    other_cards = [other for other in others if other.card != run.card]
    earlier = [newest(each) for each in (same_card, other_cards)]
    return [line for other in earlier if other is not None for line in _differences(run, other)]


def _differences(run: Run, other: Run) -> Iterator[str]:
    now, before = _digests(run.rows), _digests(other.rows)
    for case, shape in sorted(now.keys() & before.keys()):
        new, old = now[case, shape], before[case, shape]
        if new["digest"] != old["digest"]:
            is_same = new.get("sources") == old.get("sources")
            sources = "the same sources" if is_same else "other sources"
            yield f"bits   {case} {shape}: not those of {other.name}, from {sources}"


def _digests(rows: Iterable[Row]) -> dict[Key, Row]:
    """Returns the last row of each output. A library chooses its kernels by card in the fast
    mode.
    """
    return {
        (row["case"], str(row.get("shape", ""))): row
        for row in rows
        if "digest" in row and row.get("mode", "exact") == "exact"
    }

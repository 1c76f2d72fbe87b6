"""Outcomes of single runs as files, so that a long search can be interrupted, parted and added up.

{folder}/{commit}/{requests}-{seed}.json    one run: a file is written once it has ended
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

import msgspec

from tests.simulation.residency.simulation import ResidencyOutcome


class Shards:
    """Runs of `commit` with `num_requests` requests each; others are not counted."""

    def __init__(self, folder: Path, commit: str, num_requests: int) -> None:
        self._folder, self._num_requests = folder / commit, num_requests

    def run(
        self, seeds: range, outcome_of: Callable[[int], ResidencyOutcome]
    ) -> Iterator[ResidencyOutcome]:
        """Runs the seeds that have not been run, and yields the outcome of each of `seeds`."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for seed in seeds:
            path = self._folder / f"{self._num_requests}-{seed}.json"
            if not path.exists():
                unfinished = path.with_suffix(".unfinished")
                unfinished.write_bytes(msgspec.json.encode(outcome_of(seed)))
                unfinished.rename(path)
            yield decoded(path.read_bytes())

    def seeds(self) -> list[int]:
        """Returns those that have been run."""
        found = self._folder.glob(f"{self._num_requests}-*.json")
        return sorted(int(each.stem.partition("-")[2]) for each in found)

    def total(self) -> ResidencyOutcome:
        """Adds up all runs that are there, wherever they were run."""
        total = ResidencyOutcome(num_runs=0)
        for seed in self.seeds():
            path = self._folder / f"{self._num_requests}-{seed}.json"
            total.add(decoded(path.read_bytes()))
        return total


def decoded(data: bytes) -> ResidencyOutcome:
    """Returns the outcome that `msgspec.json.encode` has made of one."""
    found = msgspec.json.decode(data)
    counters = {each.name for each in fields(ResidencyOutcome) if each.default_factory is Counter}
    return ResidencyOutcome(
        **{name: Counter(each) if name in counters else each for name, each in found.items()}
    )


def ranges(seeds: list[int]) -> str:
    """Returns seeds as text: 0-3, 7."""
    parts: list[list[int]] = []
    for seed in seeds:
        if parts and parts[-1][-1] == seed - 1:
            parts[-1][1:] = [seed]
        else:
            parts.append([seed])
    return ", ".join("-".join(map(str, each)) for each in parts)

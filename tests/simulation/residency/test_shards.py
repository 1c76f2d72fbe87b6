"""A search in parts is the same as one without a pause."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.simulation.residency.shards import Shards, ranges
from tests.simulation.residency.simulation import ResidencyOutcome


def test_runs_go_on_where_they_stopped_and_add_up(tmp_path: Path) -> None:
    asked = list[int]()

    def outcome_of(seed: int) -> ResidencyOutcome:
        asked.append(seed)
        if seed == 3 and asked.count(3) == 1:
            raise KeyboardInterrupt
        return ResidencyOutcome(Counter(finished=seed), refusals=Counter(gateway=1), virtual_s=0.5)

    shards = Shards(tmp_path, "abc", 10)
    try:
        list(shards.run(range(1, 5), outcome_of))
    except KeyboardInterrupt:
        assert shards.seeds() == [1, 2]
    found = list(shards.run(range(1, 5), outcome_of))
    assert asked == [1, 2, 3, 3, 4]
    assert [each.endings["finished"] for each in found] == [1, 2, 3, 4]
    list(Shards(tmp_path, "abc", 10).run(range(8, 9), outcome_of))
    list(Shards(tmp_path, "abc", 11).run(range(1), outcome_of))
    list(Shards(tmp_path, "abd", 10).run(range(1), outcome_of))
    total = shards.total()
    assert (total.num_requests, total.num_runs, total.virtual_s) == (18, 5, 2.5)
    assert total.refusals == Counter(gateway=5)
    assert ranges(shards.seeds()) == "1-4, 8"

from __future__ import annotations

from typing import Any

from shared.telemetry.log_limit import INTERVAL_S, MAX_KINDS, LogLimit


def test_each_kind_has_a_line_a_minute_with_the_number_of_those_left_out() -> None:
    now, lines = [0.0], list[tuple[str, dict[str, Any]]]()

    def write(event: str, **fields: Any) -> None:
        lines.append((event, fields))

    limit = LogLimit(lambda: now[0])
    for _ in range(100):
        limit.write(write, "bad", "b", site="b")
        limit.write(write, "bad", "c", site="c")
    assert lines == [("bad", {"site": "b"}), ("bad", {"site": "c"})]
    now[0] = INTERVAL_S
    limit.write(write, "bad", "b", site="b")
    assert lines[2:] == [("bad", {"site": "b", "num_left_out": 99})]
    for number in range(2 * MAX_KINDS):
        limit.write(write, "bad", str(number))
    assert len(limit._written) == MAX_KINDS

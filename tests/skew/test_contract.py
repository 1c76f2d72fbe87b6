"""The comparison of types finds each change that an older or newer process would not read."""

from __future__ import annotations

import pytest

from tests.skew.contract import breaks, parsed

OLD = """
Heartbeat
  roles: ['decode' | 'prefill', …] (min_length 1)
  load: object | none = None
    running: int (ge 0)
Placed
  request_id: str (max_length 256)
  reason: 'a' | 'b'
  pushes: [array, …]
    -: str
    -: int = 0
"""


@pytest.mark.parametrize(
    "before, after",
    [
        ("  request_id: str (max_length 256)", "  request_id: str (max_length 256)\n  at: int = 0"),
        ("    running: int (ge 0)", "    running: int (ge 0)\n    waiting: int = 0"),
        ("    -: int = 0", "    -: int = 0\n    -: str = ''"),
        ("'decode' | 'prefill'", "'decode' | 'encode' | 'prefill'"),
        ("Placed\n", "Other\n  at: int\nPlaced\n"),
    ],
)
def test_allowed(before: str, after: str) -> None:
    assert before in OLD
    assert [*breaks(parsed(OLD), parsed(OLD.replace(before, after)))] == []


@pytest.mark.parametrize(
    "before, after, found",
    [
        ("Placed", "Put", "Placed is gone"),
        ("  request_id: str (max_length 256)\n", "", "Placed.request_id is gone"),
        ("  reason", "  at: int\n  reason", "Placed.at is new and has no default"),
        ("(max_length 256)", "(max_length 128)", "Placed.request_id was"),
        ("    running: int (ge 0)", "    running: float", "Heartbeat.load.running was"),
        ("object | none = None", "object | none", "Heartbeat.load has no default any more"),
        ("    -: int = 0\n", "", "Placed.pushes has fewer fields"),
        ("    -: str\n", "    -: bytes\n    -: str\n", "Placed.pushes.- was"),
        ("'a' | 'b'", "'a' | 'b' | 'c'", "Placed.reason was"),
        ("'decode' | 'prefill'", "'decode'", "Heartbeat.roles was"),
    ],
)
def test_break(before: str, after: str, found: str) -> None:
    assert before in OLD
    first, *_ = breaks(parsed(OLD), parsed(OLD.replace(before, after)))
    assert first.startswith(found)

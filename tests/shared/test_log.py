from __future__ import annotations

import json
from typing import Any

import pytest

from shared.log import json_line


@pytest.mark.parametrize(
    "event",
    [
        {"event": "started", "phases": {"queue": 0.25}, "workers": ["a", "b"], "none": None},
        {"event": "failed", "error": OSError(2, "no such file")},
        {"event": "odd", "path": '\udc80 \n " é'},
    ],
)
def test_line_is_that_of_json_dumps(event: dict[str, Any]) -> None:
    line = json_line(event, default=repr)
    assert json.loads(line) == json.loads(json.dumps(event, default=repr))
    assert f'"event": "{event["event"]}"' in line
    assert "\n" not in line

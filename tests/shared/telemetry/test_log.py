from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest

from shared.telemetry.log import json_line
from shared.telemetry.log_text import text_of

SCRIPT = """
import sys, structlog
from shared.telemetry.log import configure_child_logging, configure_service_logging

level, log_format = sys.argv[1:]
configure_service_logging("p-1", level=level, log_format=log_format)
structlog.get_logger().info("seen", own=1)
structlog.reset_defaults()
configure_child_logging("rank-1")
try:
    raise ValueError("odd")
except ValueError:
    structlog.get_logger().error("failed", own="two words", exc_info=True)
"""
LIBRARY = """
import asyncio, logging
from shared.telemetry.log import configure_logging

configure_logging("p-1")
configure_logging("p-1")
logging.getLogger("asyncio").warning(
    "returning true from eof_received() has no effect when using ssl"
)
logging.getLogger("some.library").warning("%d odd\\nthings", 3)
logging.getLogger("some.library").info("usual")
"""
ODD_LIBRARY = """
import logging
from shared.telemetry.log import configure_logging

configure_logging("p-1")
odd = logging.getLogger("some.library")
odd.error(OSError("no route"))
odd.warning("%d things", "three")
odd.log(35, "own level")
"""


def lines_of(*arguments: str, script: str = SCRIPT) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stderr.splitlines()


def test_json_lines_begin_with_time_level_and_event() -> None:
    seen, failed = map(json.loads, lines_of("info", "auto"))
    assert [*seen] == ["timestamp", "level", "event", "own", "process"]
    assert (seen["event"], seen["process"]) == ("seen", "p-1")
    assert (failed["level"], failed["process"]) == ("error", "rank-1")
    assert "ValueError: odd" in failed["exception"]


def test_level_and_format_are_those_of_child_processes() -> None:
    line, *trace = lines_of("error", "text")
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}Z error   rank-1 failed own=\"two words\"", line
    )
    assert trace[-1] == "    ValueError: odd"


def test_messages_of_libraries_are_lines_as_others() -> None:
    (line,) = lines_of(script=LIBRARY)
    logged = json.loads(line)
    assert (logged["level"], logged["event"]) == ("warning", "library_message")
    assert (logged["library"], logged["message"]) == ("some.library", "3 odd\nthings")
    assert logged["process"] == "p-1"


def test_no_message_of_a_library_raises() -> None:
    lines = [json.loads(each) for each in lines_of(script=ODD_LIBRARY)]
    assert [(each["level"], each["message"]) for each in lines] == [
        ("error", "no route"),
        ("warning", "'%d things' ('three',)"),
        ("warning", "own level"),
    ]


def test_no_logged_text_commands_a_terminal() -> None:
    odd: dict[str, Any] = {"event": "a\x1b[2Jb", "k\n": "\x07\u202e", "exception": "x\n\x1b]0;y"}
    odd["phases"] = {"queue\x07": 0.25, "next": "a b"}
    text = text_of(odd, has_colors=False)
    assert r'phases={queue\x07=0.25 next="a b"}' in text
    assert not [each for each in text if each != "\n" and not each.isprintable()]
    assert "a\\x1b[2Jb" in text


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

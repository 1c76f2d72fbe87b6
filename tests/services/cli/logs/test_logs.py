"""`hearth logs`: lines of all formats, in the order of time."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from services.cli.logs.log_lines import parse_line
from services.cli.logs.log_tail import LogTail, find_logs, follow, last_lines
from services.local.state import StateDir
from tests.services.cli.in_process import call_hearth

LISTENING = '{"timestamp": "2026-11-27T16:36:20.980902Z", "level": "info", "event": "listening"}'
LOST = (
    '{"timestamp": "2026-11-27T16:36:21.5Z", "level": "warning", "event": "peer_lost", '
    '"peer": "a b"}'
)


def test_json_line_is_shown_as_text() -> None:
    line = parse_line(LOST, "scheduler-1", 0.0)
    assert line.text(has_colors=False) == (
        '2026-11-27 16:36:21.500Z warning scheduler-1 peer_lost peer="a b"'
    )
    assert line.json() == LOST


@pytest.mark.parametrize(
    ("raw", "level", "event"),
    [
        ("[7] 2026/11/27 16:36:13.655484 [ERR] no memory", "error", "no memory"),
        ("[7] 2026/11/27 16:36:13.655484 [INF]   Version:  2.15.1", "info", "Version:  2.15.1"),
        ("8:M 27 Nov 2026 16:36:13.697 # Can't save", "warning", "Can't save"),
        ("8:M 27 Nov 2026 16:36:13.697 * Ready", "info", "Ready"),
        ("8:M 27 Nov 2026 16:36:13.697 # Server initialized", "info", "Server initialized"),
        ("8:signal-handler (1795801810) Received SIGTERM", "info", "Received SIGTERM"),
        ("2026-11-27 16:36:13.655Z error   worker-1 failed x=1", "error", "failed x=1"),
        ("worker-1: no such file", "error", "worker-1: no such file"),
        ("UserWarning: odd", "warning", "UserWarning: odd"),
        ("{no JSON", "warning", "{no JSON"),
    ],
)
def test_other_lines_have_level_and_time(raw: str, level: str, event: str) -> None:
    line = parse_line(raw, "worker-1", 1_795_797_373.0)
    assert (line.level, line.event["event"], line.process) == (level, event, "worker-1")
    assert json.loads(line.json())["level"] == level
    assert line.unix_s > 1_795_700_000


def test_levels_are_ordered_and_unknown_ones_are_shown() -> None:
    line = parse_line(LOST, "p", 0.0)
    assert [line.has_level(each) for each in ("debug", "warning", "error")] == [True, True, False]
    assert parse_line('{"level": "critical", "event": "x"}', "p", 0.0).has_level("error")


def test_tail_reads_whole_lines_once_also_after_a_rotation(tmp_path: Path) -> None:
    path = tmp_path / "p-1.log"
    path.with_name("p-1.log.1").write_text("old\n")
    path.write_text("one\ntw")
    tail = LogTail(path)

    def events() -> list[str]:
        return [each.event["event"] for each in tail.read()]

    assert events() == ["old", "one"]
    assert events() == []
    with path.open("a") as file:
        file.write("o\n")
    assert events() == ["two"]
    path.write_text("3\n")  # shorter: it has been emptied
    assert events() == ["3"]


def test_lines_before_the_first_time_have_that_time(tmp_path: Path) -> None:
    path = tmp_path / "warm.log"
    path.write_text(f"odd\n{LISTENING}\n")
    odd, listening = LogTail(path).read()
    assert odd.unix_s == listening.unix_s > 1_795_700_000
    path.write_text("odd\n")
    (odd,) = LogTail(path).read()
    assert odd.unix_s == pytest.approx(path.stat().st_mtime)


def test_following_finds_new_logs_and_orders_what_came_together(tmp_path: Path) -> None:
    (tmp_path / "b.log").write_text("")
    added = iter([{"b": LOST, "a": LISTENING}, {}])

    def wait() -> bool:
        lines = next(added)
        for name, line in lines.items():
            (tmp_path / f"{name}.log").write_text(f"{line}\n")
        return bool(lines)

    found = follow(lambda: find_logs([tmp_path]), {}, wait)
    assert [each.event["event"] for each in found] == ["listening", "peer_lost"]
    assert last_lines([], 3) == []


def test_logs_of_the_newest_cluster(tmp_path: Path) -> None:
    def hearth_logs(*arguments: str) -> tuple[int, str, str]:
        shown = call_hearth(("logs", *arguments), {"XDG_STATE_HOME": str(tmp_path)})
        return shown.returncode, shown.stdout, shown.stderr

    assert hearth_logs()[:2] == (2, "")
    state = StateDir.create(tmp_path / "hearth" / "clusters")
    (state.logs / "gateway-1.log").write_text(f"{LISTENING}\n")
    (state.logs / "kv_index-1.log").write_text(f"{LOST}\n")
    (state.logs / "host-1.log").write_text("")
    of_host = tmp_path / "hearth" / "hosts" / "host-1" / "logs"
    of_host.mkdir(parents=True)
    (of_host / "qwen-r1.log").write_text("hearth: no memory\n")
    os.utime(of_host / "qwen-r1.log", (1, 1))  # the time of its line
    assert hearth_logs("--json", "-n", "1") == (0, f"{LOST}\n", "")
    assert hearth_logs("gateway-1", "--json") == (0, f"{LISTENING}\n", "")
    status, output, _ = hearth_logs("--level", "error")
    assert (status, output.split()[2:]) == (0, ["error", "qwen-r1", "hearth:", "no", "memory"])
    status, _, errors = hearth_logs("nats")
    assert (status, errors.count("\n")) == (2, 1)
    assert "no log of 'nats': there are those of gateway-1, host-1, kv_index-1, qwen-r1" in errors
    state.close(retain_logs=True)
    assert hearth_logs("--json", "-n", "1", "--follow")[1:] == (
        f"{LOST}\n",
        "note: no cluster is running: logs of the last one, which failed\n",
    )

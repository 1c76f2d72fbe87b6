from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path
from unittest.mock import Mock

import pytest

from services.local.processes import log_files
from services.local.processes.log_files import bound_logs, last_event, last_line, level_of, open_log
from shared.clock import MonotonicClock


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "MAX_LOG_BYTES", 100)
    monkeypatch.setattr(log_files, "MAX_LOGS", 3)


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ('{"timestamp":"2026-11-27T16:28:03Z","level":"warning","event":"peer_lost"}', "warning"),
        ('{"event":"failed","level":"error"}', "error"),
        ("2026-11-27 16:28:03.123Z error   gateway-1 failed", "error"),
        ("2026-11-27 16:28:03.123Z info    gateway-1 ready", "info"),
        ("[71] 2026/11/27 16:28:03.1 [INF] Server is ready", "info"),
        ("[71] 2026/11/27 16:28:03.1 [FTL] no room", "critical"),
        ("71:M 27 Nov 2026 16:28:03.123 * Ready to accept connections", "info"),
        ("71:M 27 Nov 2026 16:28:03.123 # Out Of Memory", "error"),
        ("71:M 27 Nov 2026 16:28:03.123 # Server initialized", "info"),
        ("71:C 27 Nov 2026 16:28:03.123 # Redis version=6.2.14, bits=64", "info"),
        ("71:M 27 Nov 2026 16:28:03.123 # User requested shutdown...", "info"),
        ("hearth: max_sequences 0 is not positive", None),
        ("{", None),
        ("", None),
    ],
)
def test_level_of_a_line(line: str, level: str | None) -> None:
    assert level_of(line) == level


def test_last_event_is_that_of_a_service(tmp_path: Path) -> None:
    path = tmp_path / "worker.log"
    assert last_event(path) == ""
    path.write_text('{"level":"info","event":"loading"}\n{"level":"info","event":"compiling"}\n')
    assert last_event(path) == "compiling"
    path.write_text('{"level":"warning","event":"nats_disconnected"}\n')
    assert last_event(path) == ""


def test_log_is_bounded_while_its_process_appends(tmp_path: Path) -> None:
    path = tmp_path / "worker.log"
    fd = open_log(path)
    for number in range(50):
        os.write(fd, b"line %d\n" % number * 4)
        bound_logs(tmp_path)
    os.close(fd)
    assert path.stat().st_size <= 100
    assert (tmp_path / "worker.log.1").stat().st_size <= 200
    assert last_line(path) == "line 49"


def test_oldest_logs_leave_unless_they_are_in_use(tmp_path: Path) -> None:
    for age in range(6):
        log = tmp_path / f"{age}.log"
        log.write_text("x\n")
        (tmp_path / f"{age}.log.1").write_text("x\n")
        os.utime(log, (1000 - age, 1000 - age))
    bound_logs(tmp_path, {tmp_path / "5.log"})
    assert sorted(each.name for each in tmp_path.glob("*.log")) == ["0.log", "1.log", "5.log"]
    assert sorted(each.name for each in tmp_path.glob("*.1")) == ["0.log.1", "1.log.1", "5.log.1"]


def test_log_that_cannot_be_opened_or_read_costs_its_lines(tmp_path: Path) -> None:
    fd = open_log(tmp_path / "missing" / "worker.log")
    assert os.write(fd, b"lost") == 4
    os.close(fd)
    assert last_line(tmp_path / "missing" / "worker.log") == ""
    bound_logs(tmp_path / "missing")


def test_copy_is_as_private_as_its_log(tmp_path: Path) -> None:
    os.close(open_log(tmp_path / "worker.log"))
    (tmp_path / "worker.log").write_text("x\n" * 200)
    bound_logs(tmp_path)
    assert stat.S_IMODE((tmp_path / "worker.log.1").stat().st_mode) == 0o600


def test_log_that_cannot_be_bounded_leaves_the_others_bounded(tmp_path: Path) -> None:
    (tmp_path / "a.log").mkdir()
    (tmp_path / "a.log" / "file").touch()
    (tmp_path / "gone.log").symlink_to("nowhere")
    for name in ("b", "z"):
        (tmp_path / f"{name}.log").write_text("x\n" * 200)
    bound_logs(tmp_path)
    assert [(tmp_path / f"{name}.log").stat().st_size for name in ("b", "z")] == [0, 0]


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), RuntimeError("no thread")])
async def test_logs_that_cannot_be_bounded_are_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    tried = Mock(side_effect=[error, error, asyncio.CancelledError])
    monkeypatch.setattr(log_files, "bound_logs", tried)
    monkeypatch.setattr(log_files, "CHECK_S", 0.0)
    with pytest.raises(asyncio.CancelledError):
        await log_files.bound_logs_while_running(tmp_path, MonotonicClock())
    assert tried.call_count == 3

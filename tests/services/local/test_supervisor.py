"""The supervisor with real processes: small Python programs and a listening socket."""

import asyncio
import os
import resource
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
import uvloop

from services.cli.logs.log_tail import LogTail
from services.local import supervisor as module
from services.local.processes.child_processes import (
    Child,
    ProcessSpec,
    ending,
    start_child,
)
from services.local.processes.log_files import last_line
from services.local.processes.supervision_log import RECENT_S, recent_restarts
from services.local.supervisor import Event, ProcessEnded, Supervisor
from shared.clock import MonotonicClock
from tests.support.servers import free_port
from tests.support.waiting import LIMIT_S, until

WAIT_S = LIMIT_S

SLEEPER = "import signal; print('up', flush=True); signal.pause()"
IGNORES_SIGTERM = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "print('up', flush=True)\nwhile True: signal.pause()"
)
LOGS_ITS_END = (
    "import signal, sys\n"
    "def end(*_):\n"
    "    with open('order', 'a') as file: file.write(sys.argv[1] + '\\n')\n"
    "    sys.exit(0)\n"
    "signal.signal(signal.SIGTERM, end); print('up', flush=True)\nwhile True: signal.pause()"
)


class EventRecorder:
    """Records the events that the supervisor reports."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Event, str]] = []

    def report(self, process_id: str, event: Event, details: str) -> None:
        self.events.append((process_id, event, details))

    async def until(self, process_id: str, event: Event, count: int = 1) -> None:
        wanted = (process_id, event)
        await until(
            lambda: [each[:2] for each in self.events].count(wanted) >= count,
            seen=lambda: self.events,
        )


@pytest.fixture
def recorder() -> EventRecorder:
    return EventRecorder()


@pytest.fixture
async def supervisor(tmp_path: Path, recorder: EventRecorder) -> AsyncIterator[Supervisor]:
    (tmp_path / "logs").mkdir()
    made = Supervisor(MonotonicClock(), tmp_path, tmp_path / "logs", recorder.report)
    yield made
    made.kill()
    await made.stop(grace_s=1.0)


def spec(name: str, code: str, *arguments: str, order: int = 0, port: int = 0) -> ProcessSpec:
    return ProcessSpec(
        process_id=name,
        argv=(sys.executable, "-c", code, *arguments),
        environ=os.environ,
        start_order=order,
        listens_on=("127.0.0.1", port) if port else None,
    )


async def wait_until_up(tmp_path: Path, name: str) -> None:
    """Waits until the program has written `up` to its log."""
    log = tmp_path / "logs" / f"{name}.log"
    await until(lambda: "up" in log.read_text())


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_startup_failure_contains_the_last_log_line(
    supervisor: Supervisor,
) -> None:
    await supervisor.launch(spec("bad", "import sys; sys.exit('no such checkpoint')"))
    with pytest.raises(ProcessEnded, match=r"bad ended during startup \(exit status 1: no such ch"):
        await asyncio.wait_for(supervisor.failure, WAIT_S)


async def test_killed_process_is_reported_logged_and_restarted_when_serving(
    supervisor: Supervisor, recorder: EventRecorder, tmp_path: Path
) -> None:
    await supervisor.launch(spec("decode-1", SLEEPER))
    supervisor.serve()
    first = supervisor.pid_of("decode-1")
    os.kill(first, signal.SIGKILL)
    await recorder.until("decode-1", "started", 2)
    assert supervisor.pid_of("decode-1") != first
    assert [event for _, event, _ in recorder.events] == [
        "started",
        "ended",
        "restarting",
        "started",
    ]
    assert recorder.events[1][2] == "was killed (SIGKILL)"
    logged = [each.event for each in LogTail(tmp_path / "logs" / "up.log").read()]
    assert [(each["level"], each["event"], each.get("how")) for each in logged] == [
        ("info", "cluster_ready", None),
        ("warning", "process_ended", "was killed (SIGKILL)"),
        ("warning", "process_restarting", None),
    ]
    assert [each["child"] for each in logged[1:]] == ["decode-1", "decode-1"]
    now = time.time()
    (restarts,) = recent_restarts(tmp_path / "logs", now)
    assert (restarts.process_id, restarts.number) == ("decode-1", 1)
    assert recent_restarts(tmp_path / "logs", now + RECENT_S) == []
    assert not supervisor.failure.done()


async def test_process_is_ready_when_its_port_accepts(
    supervisor: Supervisor, recorder: EventRecorder
) -> None:
    port = free_port()
    code = (
        "import socket, sys, signal; server = socket.socket()\n"
        "server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
        "server.bind(('127.0.0.1', int(sys.argv[1]))); server.listen(); signal.pause()"
    )
    await supervisor.launch(spec("nats", code, str(port), port=port))
    assert recorder.events == [("nats", "started", ""), ("nats", "ready", "")]


async def test_processes_are_stopped_in_reverse_order(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    names = ("nats", "decode-1", "gateway-1")
    for order, name in enumerate(names):
        await supervisor.launch(spec(name, LOGS_ITS_END, name, order=order))
        await wait_until_up(tmp_path, name)
    pids = [supervisor.pid_of(name) for name in names]
    await supervisor.stop(grace_s=WAIT_S)
    assert (tmp_path / "order").read_text().split() == ["gateway-1", "decode-1", "nats"]
    assert not any(is_alive(pid) for pid in pids)


async def test_services_of_a_failed_start_end_before_their_servers(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    """They would log that they have lost them, and not why the start failed."""
    for order, name in enumerate(("nats", "decode-1")):
        await supervisor.launch(spec(name, LOGS_ITS_END, name, order=order))
        await wait_until_up(tmp_path, name)
    await supervisor.abandon(grace_s=WAIT_S)
    assert (tmp_path / "order").read_text().split() == ["decode-1", "nats"]


async def test_process_that_ignores_sigterm_is_killed(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    await supervisor.launch(spec("stubborn", IGNORES_SIGTERM))
    await wait_until_up(tmp_path, "stubborn")
    pid = supervisor.pid_of("stubborn")
    async with asyncio.timeout(WAIT_S):
        await supervisor.stop(grace_s=0.05)
    assert not is_alive(pid)


async def test_children_of_a_killed_parent_die(tmp_path: Path) -> None:
    code = (
        "import asyncio, os, pathlib, sys\n"
        "from services.local.processes.child_processes import ProcessSpec, start_child\n"
        "async def main():\n"
        "    here = pathlib.Path(sys.argv[1])\n"
        "    argv = (sys.executable, '-c', 'import signal; signal.pause()')\n"
        "    spec = ProcessSpec(process_id='child', argv=argv, environ=os.environ)\n"
        "    child = await start_child(spec, here, here)\n"
        "    print(child.process.pid, flush=True)\n"
        "    await child.process.wait()\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    parent.kill()
    await parent.wait()
    await until(lambda: not is_running(pid))


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_child_has_its_umask_under_every_event_loop(
    run: Callable[..., object], tmp_path: Path
) -> None:
    code = "import os; os.close(os.open('made', os.O_CREAT | os.O_WRONLY, 0o666))"
    argv = (sys.executable, "-c", code)

    async def main() -> int:
        spec = ProcessSpec(process_id="child", argv=argv, environ=os.environ, umask=0o077)
        return await (await start_child(spec, tmp_path, tmp_path)).process.wait()

    assert run(main()) == 0
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o600


def is_running(pid: int) -> bool:
    """Returns False for a zombie, too: its new parent may reap it later."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def test_last_line_skips_blank_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("x" * 40_000 + "\nthe reason\n\n  \n")
    assert last_line(log) == "the reason"
    log.write_text("")
    assert last_line(log) == ""


WARNING = '{"level":"warning","event":"peer_lost"}'
ERROR = '{"level":"error","event":"out_of_memory"}'


@pytest.mark.parametrize(
    ("returncode", "line", "words"),
    [
        (-9, WARNING, "was killed (SIGKILL)"),
        (-9, "up", "was killed (SIGKILL)"),
        (-9, ERROR, f"was killed (SIGKILL: {ERROR})"),
        (-11, WARNING, "ended (SIGSEGV)"),
        (2, WARNING, "ended (exit status 2)"),
        (2, "hearth: max_sequences 0", "ended (exit status 2: max_sequences 0)"),
        (1, "", "ended (exit status 1)"),
    ],
)
def test_end_quotes_errors_alone(tmp_path: Path, returncode: int, line: str, words: str) -> None:
    path = tmp_path / "a.log"
    path.write_text(f"{line}\n")
    process: Any = SimpleNamespace(returncode=returncode)
    assert Child(spec("a", ""), process, path).end() == words


@pytest.mark.parametrize(
    ("returncode", "words"), [(0, "exit status 0"), (-9, "SIGKILL"), (-250, "signal 250")]
)
def test_exit_status_in_words(returncode: int, words: str) -> None:
    assert ending(returncode) == words


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), RuntimeError("no thread")])
async def test_start_that_raises_is_tried_again(
    supervisor: Supervisor,
    recorder: EventRecorder,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    monkeypatch.setattr(module, "MIN_PAUSE_S", 0.01)
    await supervisor.launch(spec("decode-1", SLEEPER))
    supervisor.serve()
    with monkeypatch.context() as patch:
        patch.setattr(module, "start_child", AsyncMock(side_effect=error))
        os.kill(supervisor.pid_of("decode-1"), signal.SIGKILL)
        await recorder.until("decode-1", "restarting", 2)
    await recorder.until("decode-1", "started", 2)


async def test_process_is_restarted_once_there_are_descriptors_again(
    supervisor: Supervisor, recorder: EventRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MIN_PAUSE_S", 0.01)
    await supervisor.launch(spec("decode-1", SLEEPER))
    supervisor.serve()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # those that are open stay
    try:
        os.kill(supervisor.pid_of("decode-1"), signal.SIGKILL)
        await recorder.until("decode-1", "ended")
        await recorder.until("decode-1", "restarting")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    await recorder.until("decode-1", "started", 2)

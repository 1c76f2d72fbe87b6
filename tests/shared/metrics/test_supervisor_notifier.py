"""What a supervisor hears of a process, over a socket of its own."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from msgspec import structs
from structlog.testing import capture_logs

from shared.messages import Heartbeat, WorkerLoad
from shared.metrics.supervisor_notifier import PROGRESS, READY, Notifier, StepWatch, TurnNotifier
from tests.support.waiting import LIMIT_S

HEARTBEAT = Heartbeat(
    process_id="decode-1",
    epoch=1,
    sequence_number=1,
    roles=("decode",),
    state="ready",
    interval_s=1,
)


def at_step(step: int, *, budget_s: float = 1.0) -> Heartbeat:
    return structs.replace(HEARTBEAT, load=WorkerLoad(step=step, step_budget_s=budget_s))


def test_process_without_a_supervisor_reports_nothing() -> None:
    assert Notifier.of_environ({}) is None
    assert Notifier.of_environ({"NOTIFY_SOCKET": ""}) is None


def test_engine_is_sound_while_its_steps_end_in_time() -> None:
    watch = StepWatch()
    assert watch.is_sound(at_step(1), now=10.0)
    assert watch.is_sound(at_step(1), now=11.0)
    assert not watch.is_sound(at_step(1), now=11.1)
    assert watch.is_sound(at_step(1, budget_s=5.0), now=11.1)  # a longer step has begun
    assert watch.is_sound(at_step(2), now=99.0)


def test_process_without_an_engine_is_sound() -> None:
    assert StepWatch().is_sound(HEARTBEAT, now=1e9)


def test_supervisor_that_does_not_read_holds_nobody_up(tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.bind(path)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.connect(path)
            sender.setblocking(False)
            with pytest.raises(BlockingIOError):
                while True:
                    sender.send(b"state")
            with capture_logs() as logs:
                Notifier(path).send(READY)
        assert [each["event"] for each in logs] == ["supervisor_not_notified"]


async def test_states_arrive_at_the_socket(tmp_path: Path) -> None:
    """Progress is reported while the process gets on, and not while its engine hangs."""
    steps = iter([1, 2])
    environ = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "40000"}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.bind(environ["NOTIFY_SOCKET"])
        notified.setblocking(False)
        notifier = Notifier.of_environ(environ)
        assert notifier is not None
        notifier.send(READY)
        hung = asyncio.Event()

        def describe() -> Heartbeat:
            step = next(steps, None)
            if step is None:
                hung.set()
            return at_step(2 if step is None else step, budget_s=0.0)

        reporting = asyncio.create_task(notifier.report_progress(describe))
        await hung.wait()
        reporting.cancel()
        received = [await asyncio.get_running_loop().sock_recv(notified, 64) for _ in range(3)]
        assert [each.decode() for each in received] == [READY, PROGRESS, PROGRESS]
        notified.settimeout(0)
        assert not _has_more(notified)


def test_loop_reports_its_turns(tmp_path: Path) -> None:
    """It is ready at the first turn; turns that follow at once report nothing."""
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.bind(address)
        notified.setblocking(False)
        every_turn, seldom = (TurnNotifier(Notifier(address, each)) for each in (0.0, 3600.0))
        for turn in (every_turn, every_turn, seldom, seldom, TurnNotifier(None)):
            turn()
        assert [notified.recv(64).decode() for _ in range(3)] == [READY, PROGRESS, READY]
        assert not _has_more(notified)


def _has_more(notified: socket.socket) -> bool:
    try:
        return bool(notified.recv(64))
    except BlockingIOError:
        return False


def test_watchdog_of_another_process_is_not_this_ones(tmp_path: Path) -> None:
    environ = {"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"}
    notifier = Notifier.of_environ(environ)
    assert notifier is not None
    asyncio.run(asyncio.wait_for(notifier.report_progress(lambda: HEARTBEAT), LIMIT_S))


def test_supervisor_that_has_gone_is_no_error(tmp_path: Path) -> None:
    Notifier(str(tmp_path / "gone")).send(READY)

"""A writer on descriptors that do not take what is written."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.telemetry.line_writer import PATIENCE_S, PAUSE_S, LineStream, LineWriter

PIPE_BYTES = 4 * 4096


def report(num_dropped: int) -> bytes:
    return f"{num_dropped} dropped\n".encode()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    yield reader, writer
    for each in (reader, writer):
        with contextlib.suppress(OSError):  # a test has closed it
            os.close(each)


def test_lines_arrive_in_order(pipe: tuple[int, int]) -> None:
    writer = LineWriter(pipe[1], report=report)
    for each in (b"one\n", b"two\n"):
        writer.write(each)
    assert os.read(pipe[0], PIPE_BYTES) == b"one\ntwo\n"


def test_reader_that_stops_costs_lines_and_is_told_how_many(pipe: tuple[int, int]) -> None:
    now = [0.0]
    writer = LineWriter(pipe[1], report=report, clock=lambda: now[0])
    full = b"x" * (PIPE_BYTES - 1) + b"\n"
    for each in (full, b"lost\n", b"lost\n"):
        writer.write(each)
    assert os.read(pipe[0], PIPE_BYTES) == full
    writer.write(b"again\n")
    assert os.read(pipe[0], PIPE_BYTES) == b"2 dropped\nagain\n"
    assert writer.num_dropped == 0
    now[0] = PAUSE_S + 2 * PATIENCE_S
    writer.write(full)
    assert os.read(pipe[0], PIPE_BYTES) == full


def test_line_that_was_cut_does_not_spoil_the_next_one(pipe: tuple[int, int]) -> None:
    writer = LineWriter(pipe[1], report=report)
    writer.write(b"y" * (PIPE_BYTES + 1) + b"\n")
    assert os.read(pipe[0], 2 * PIPE_BYTES) == b"y" * PIPE_BYTES
    writer.write(b"next\n")
    assert os.read(pipe[0], PIPE_BYTES) == b"\n1 dropped\nnext\n"


def test_signal_handler_that_logs_within_a_wait_for_the_reader(pipe: tuple[int, int]) -> None:
    """One object polls once at a time, and would raise in whatever the signal interrupts."""
    writer = LineWriter(pipe[1], report=report)
    writer.write(b"x" * PIPE_BYTES)
    before = signal.signal(signal.SIGALRM, lambda *_: writer.write(b"of the handler\n"))
    try:
        signal.setitimer(signal.ITIMER_REAL, PATIENCE_S / 4)
        writer.write(b"lost\n")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert writer.num_dropped == 2


def test_reader_that_has_gone_and_full_disk_raise_nothing(pipe: tuple[int, int]) -> None:
    os.close(pipe[0])
    with open("/dev/full", "wb", buffering=0) as full:  # noqa: PTH123
        for fd in (pipe[1], full.fileno()):
            writer = LineWriter(fd, report=report)
            for _ in range(3):
                writer.write(b"lost\n")
            assert writer.num_dropped == 3


def test_stream_writes_any_text(pipe: tuple[int, int]) -> None:
    print("caf\u00e9", "\udc80", file=LineStream(LineWriter(pipe[1])), flush=True)
    assert os.read(pipe[0], PIPE_BYTES) == b"caf\xc3\xa9 \\udc80\n"


SCRIPT = """
import asyncio, logging, os, sys, threading, warnings
import structlog
from shared.telemetry.log import configure_logging
from shared.telemetry.line_writer import replace_standard_streams

class Broken:
    def __repr__(self): raise ValueError("no text")

done = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
replace_standard_streams()
configure_logging("process-1")
log = structlog.get_logger()
for _ in range(200):
    log.error("event", text="x" * 100, value=Broken(), other="\\udc80")
    print("printed", "x" * 100, flush=True)
    warnings.warn("warned " + "x" * 100)
    logging.getLogger("library").error("logged " + "x" * 100)
    os.system("echo from a child; echo from a child >&2")
thread = threading.Thread(target=lambda: 1 / 0); thread.start(); thread.join()
async def failing():
    asyncio.get_running_loop().call_soon(lambda: 1 / 0)
    await asyncio.sleep(0.01)
asyncio.run(failing())
os.write(done, b"done")
"""


@pytest.mark.parametrize("fault", ["reader stops", "reader has gone", "full disk", "closed"])
def test_nothing_that_a_process_writes_stops_it(fault: str, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    if fault == "reader has gone":
        os.close(reader)
    if fault == "full disk":
        writer = os.open("/dev/full", os.O_WRONLY)
    close = "exec 0<&- 1>&- 2>&-; " if fault == "closed" else ""
    command = f'{close}exec "$0" -c "$1" "$2"'
    done = tmp_path / "done"
    subprocess.run(
        ["/bin/sh", "-c", command, sys.executable, SCRIPT, str(done)],
        stdout=writer,
        stderr=writer,
        timeout=30,
        check=True,
    )
    assert done.read_text() == "done"

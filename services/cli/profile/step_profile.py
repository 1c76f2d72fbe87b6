"""Has a worker record its next steps, and writes the trace to a file."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from services.cli.fleet.find_worker import find_worker
from services.cli.nats_address import find_nats
from services.local.credentials import process_id_for
from shared.errors import ConfigError, DependencyUnavailable, NoResponders, RequestTimeout
from shared.messages import (
    MAX_PROFILE_S,
    MAX_PROFILED_STEPS,
    ProfilePart,
    ProfileSteps,
    ReadProfile,
)
from shared.subjects import profile
from shared.telemetry.log import configure_logging
from shared.tls import TlsFiles
from shared.transport.bus import Bus, NatsBus

CONNECT_TIMEOUT_S = REQUEST_TIMEOUT_S = 5.0
POLL_S = 0.2
STDOUT = Path("-")
COLLECT_S = 60.0  # time to collect and compress what was recorded


def run_profile(
    nats_url: str | None, worker_id: str, num_steps: int, *, timeout_s: float, out: Path | None
) -> None:
    """Writes the file and prints what is in it. Raises ConfigError, the worker's refusal,
    RequestTimeout if it computes no step, or DependencyUnavailable.
    """
    command = _command(num_steps, timeout_s)
    path = Path(f"{worker_id}-profile.json.gz") if out is None else out
    _check_out(path)
    configure_logging("profile", level="error")  # not that the connection has been closed
    url = find_nats(nats_url, "operator")
    num_recorded, trace = asyncio.run(_recorded(url, worker_id, command))
    write_trace(path, trace)
    of_all = "" if num_recorded == num_steps else f" of {num_steps}, no more came in time"
    print(
        f"{worker_id}: {num_recorded} steps{of_all}; {len(trace) / 1e6:.1f} MB{_where(path)}: "
        "open it in https://ui.perfetto.dev or chrome://tracing",
        file=sys.stderr if path == STDOUT else sys.stdout,
    )


def _where(path: Path) -> str:
    return "" if path == STDOUT else f" in {path}"


def _check_out(path: Path) -> None:
    if path == STDOUT:
        if sys.stdout.isatty():
            raise ConfigError("--out -: not to a terminal")
    elif path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"--out {path}: not a file that can be written")


def _command(num_steps: int, timeout_s: float) -> ProfileSteps:
    if not 1 <= num_steps <= MAX_PROFILED_STEPS:
        raise ConfigError(f"--steps {num_steps}: it must be 1 to {MAX_PROFILED_STEPS}")
    if not 0 < timeout_s <= MAX_PROFILE_S:
        raise ConfigError(
            f"--timeout-s {timeout_s:g}: it must be more than 0, at most {MAX_PROFILE_S:g}"
        )
    return ProfileSteps(num_steps=num_steps, timeout_s=timeout_s)


async def _recorded(url: str, worker_id: str, command: ProfileSteps) -> tuple[int, bytes]:
    async with _connected(url) as bus:
        return await record_steps(bus, worker_id, command)


def write_trace(path: Path, trace: bytes) -> None:
    """Writes all of the file, or leaves none. Raises ConfigError."""
    try:
        if path == STDOUT:
            sys.stdout.buffer.write(trace)
            sys.stdout.flush()
        else:
            path.write_bytes(trace)
    except OSError as error:
        if path != STDOUT and path.is_file():
            path.unlink()
        raise ConfigError(f"--out {path}: {error.strerror}") from None


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[NatsBus]:
    bus = await NatsBus.connect(
        url,
        process_id=process_id_for("operator", url),
        timeout_s=CONNECT_TIMEOUT_S,
        tls=TlsFiles.of_environ("NATS", os.environ),
    )
    try:
        yield bus
    finally:
        await bus.close()


async def record_steps(bus: NatsBus, worker_id: str, command: ProfileSteps) -> tuple[int, bytes]:
    """Returns the number of recorded steps and the trace. Raises as `run_profile`."""
    heartbeat = await find_worker(bus, worker_id)
    worker = RecordingWorker(bus, worker_id, profile(heartbeat.roles[0], worker_id))
    try:
        begun = await worker.ask(command)
    except RequestTimeout:
        if bus.has_denied(worker.subject):
            raise ConfigError(
                "this credential may not record steps: it takes an operator's, and the NATS "
                "configuration of this release (hearth nats-config)"
            ) from None
        raise
    try:
        async with asyncio.timeout(command.timeout_s + COLLECT_S):
            part = await worker.complete(begun.number)
    except TimeoutError:
        raise DependencyUnavailable(f"{worker_id} has not ended its recording") from None
    if not part.num_steps:
        raise RequestTimeout(f"{worker_id} computed no step within {command.timeout_s:g} s")
    return part.num_steps, await worker.read(part)


@dataclass(frozen=True)
class RecordingWorker:
    """A worker, as the operator of its recording sees it."""

    bus: Bus
    worker_id: str
    subject: str

    async def ask(self, command: ProfileSteps | ReadProfile) -> ProfilePart:
        """Raises the worker's refusal, RequestTimeout, or DependencyUnavailable if it has ended."""
        try:
            return await self.bus.request(
                self.subject, command, ProfilePart, timeout_s=REQUEST_TIMEOUT_S
            )
        except NoResponders:
            raise DependencyUnavailable(
                f"{self.worker_id} has ended, or its release records no steps"
            ) from None
        except RequestTimeout:
            raise RequestTimeout(
                f"{self.worker_id} has not answered within {REQUEST_TIMEOUT_S:g} s"
            ) from None

    async def complete(self, number: int) -> ProfilePart:
        """Returns the first part, once it is there. A worker that collects events may be late."""
        while True:
            await asyncio.sleep(POLL_S)
            with contextlib.suppress(RequestTimeout):
                part = await self.ask(ReadProfile(number=number))
                if part.num_bytes is not None:
                    return part

    async def read(self, first: ProfilePart) -> bytes:
        """Returns the trace that begins with this part."""
        assert first.num_bytes is not None
        trace = bytearray(first.data)
        while len(trace) < first.num_bytes:
            part = await self.ask(ReadProfile(number=first.number, first_byte=len(trace)))
            if not part.data:
                raise DependencyUnavailable(f"the trace ends after {len(trace)} bytes")
            trace += part.data
        return bytes(trace)

"""Has a worker record its next steps, and writes the trace to a file."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from services.cli.fleet.find_worker import find_worker
from services.cli.nats_address import find_nats
from services.local.credentials import process_id_for
from shared.errors import ConfigError, DependencyUnavailable, RequestTimeout
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
from shared.transport.bus import NatsBus

CONNECT_TIMEOUT_S = REQUEST_TIMEOUT_S = 5.0
POLL_S = 0.2
COLLECT_S = 60.0  # time to collect and compress what was recorded


def run_profile(
    nats_url: str | None, worker_id: str, num_steps: int, *, timeout_s: float, out: Path | None
) -> None:
    """Writes the file and prints what is in it. Raises ConfigError, the worker's refusal,
    RequestTimeout if it computes no step, or DependencyUnavailable.
    """
    command = _command(num_steps, timeout_s)
    path = Path(f"{worker_id}-profile.json.gz") if out is None else out
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"--out {path}: not a file that can be written")
    configure_logging("profile", level="error")  # not that the connection has been closed
    url = find_nats(nats_url, "operator")
    num_recorded, trace = asyncio.run(_recorded(url, worker_id, command))
    _write(path, trace)
    of_all = "" if num_recorded == num_steps else f" of {num_steps}, no more came in time"
    print(
        f"{worker_id}: {num_recorded} steps{of_all}; {len(trace) / 1e6:.1f} MB in {path}: "
        "open it in https://ui.perfetto.dev or chrome://tracing"
    )


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


def _write(path: Path, trace: bytes) -> None:
    try:
        path.write_bytes(trace)
    except OSError as error:
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
    worker = await find_worker(bus, worker_id)
    subject = profile(worker.roles[0], worker_id)
    try:
        begun = await bus.request(subject, command, ProfilePart, timeout_s=REQUEST_TIMEOUT_S)
    except RequestTimeout:
        if bus.has_denied(subject):
            raise ConfigError(
                "this credential may not record steps: it takes an operator's, and the NATS "
                "configuration of this release (hearth nats-config)"
            ) from None
        raise
    try:
        async with asyncio.timeout(command.timeout_s + COLLECT_S):
            part = await _complete(bus, subject, begun.number)
    except TimeoutError:
        raise DependencyUnavailable(f"{worker_id} has not ended its recording") from None
    if not part.num_steps:
        raise RequestTimeout(f"{worker_id} computed no step within {command.timeout_s:g} s")
    return part.num_steps, await _read(bus, subject, part)


async def _complete(bus: NatsBus, subject: str, number: int) -> ProfilePart:
    """Returns the first part, once it is there."""
    while True:
        await asyncio.sleep(POLL_S)
        part = await _request(bus, subject, ReadProfile(number=number))
        if part.num_bytes is not None:
            return part


async def _read(bus: NatsBus, subject: str, first: ProfilePart) -> bytes:
    assert first.num_bytes is not None
    trace = bytearray(first.data)
    while len(trace) < first.num_bytes:
        command = ReadProfile(number=first.number, first_byte=len(trace))
        part = await _request(bus, subject, command)
        if not part.data:
            raise DependencyUnavailable(f"the trace ends after {len(trace)} bytes")
        trace += part.data
    return bytes(trace)


async def _request(bus: NatsBus, subject: str, command: ReadProfile) -> ProfilePart:
    return await bus.request(subject, command, ProfilePart, timeout_s=REQUEST_TIMEOUT_S)

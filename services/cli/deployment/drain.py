"""Drains workers, and shows what they still hold, until they are safe to stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.cli.fleet.find_worker import LISTEN_S
from services.cli.nats_address import find_nats
from services.local.credentials import process_id_for
from shared.clock import Clock, MonotonicClock
from shared.errors import ConfigError, DependencyUnavailable, NoResponders, RequestTimeout
from shared.messages import DrainState, DrainWorker, Heartbeat
from shared.subjects import HEARTBEATS, host_models, lifecycle
from shared.telemetry.log import configure_logging
from shared.tls import TlsFiles
from shared.transport.bus import Bus, NatsBus

POLL_S = 0.25
REPLY_TIMEOUT_S = 5.0
SAFE = "safe to stop"


@dataclass(frozen=True)
class DrainOptions:
    """`target` is a worker's id, or the name of a machine; `timeout_s` bounds the whole drain."""

    target: str
    hand_over_s: float
    timeout_s: float
    is_undone: bool
    is_forced: bool


def run_drain(nats_url: str | None, options: DrainOptions) -> bool:
    """Prints each change. Returns whether all of the workers are safe to stop. Raises ConfigError,
    or DependencyUnavailable.
    """
    configure_logging("drain", level="error")
    return asyncio.run(_drain(find_nats(nats_url, "operator"), options))


async def _drain(nats_url: str, options: DrainOptions) -> bool:
    bus = await NatsBus.connect(
        nats_url,
        process_id=process_id_for("operator", nats_url),
        tls=TlsFiles.of_environ("NATS", os.environ),
    )
    try:
        return await drain(bus, MonotonicClock(), options, print)
    finally:
        await bus.close()


async def drain(bus: Bus, clock: Clock, options: DrainOptions, show: Callable[[str], None]) -> bool:
    """Returns whether all workers of the target are safe to stop, or serve again if the drain is
    undone. Raises ConfigError.
    """
    heard = await _heard(bus, options)
    workers = targets(options.target, heard)
    if not options.is_undone and not options.is_forced:
        check_others(workers, heard)
    each = (_drain_one(bus, clock, options, worker, show) for worker in workers)
    return all(await asyncio.gather(*each))


async def _heard(bus: Bus, options: DrainOptions) -> list[Heartbeat]:
    """Listens until the drain of a process can be decided, or for LISTEN_S, as for a machine."""
    heard: dict[str, Heartbeat] = {}
    is_enough = asyncio.Event()

    def on_heartbeat(beat: Heartbeat) -> None:
        heard[beat.process_id] = beat
        if options.target in heard and _is_decided(options, list(heard.values())):
            is_enough.set()

    leave = await bus.subscribe(HEARTBEATS, Heartbeat, on_heartbeat)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LISTEN_S):
            await is_enough.wait()
    await leave()
    if not heard:
        raise DependencyUnavailable(f"no heartbeat within {LISTEN_S:g} s: is the cluster running?")
    return list(heard.values())


def _is_decided(options: DrainOptions, heard: Sequence[Heartbeat]) -> bool:
    try:
        workers = targets(options.target, heard)
        if not options.is_undone and not options.is_forced:
            check_others(workers, heard)
    except ConfigError:
        return False
    return True


def targets(target: str, heard: Sequence[Heartbeat]) -> list[Heartbeat]:
    """Returns the worker or host with that id, or all of the machine. Raises ConfigError."""
    drainable = [each for each in heard if each.load is not None or each.host is not None]
    found = [each for each in drainable if target in (each.process_id, each.host_name)]
    if not found:
        names = sorted({each.process_id for each in drainable} | {e.host_name for e in drainable})
        raise ConfigError(
            f"no worker and no machine {target!r}, of {', '.join(filter(None, names)) or 'none'}"
        )
    return found


def check_others(workers: Sequence[Heartbeat], heard: Sequence[Heartbeat]) -> None:
    """Raises ConfigError if no other worker decodes the model of one of these."""
    drained = {each.process_id for each in workers}
    decoded = {
        each.model.name
        for each in heard
        if each.model is not None
        and each.process_id not in drained
        and each.state == "ready"
        and "decode" in each.roles
    }
    for each in workers:
        if "decode" in each.roles and each.model is not None and each.model.name not in decoded:
            raise ConfigError(
                f"{each.process_id} is the last worker that decodes {each.model.name}: without it "
                "no request is served; --force drains it all the same"
            )


async def _drain_one(
    bus: Bus,
    clock: Clock,
    options: DrainOptions,
    worker: Heartbeat,
    show: Callable[[str], None],
) -> bool:
    """Returns False if the worker is not safe to stop in time. One that does not answer is told
    again, and holds up no other.
    """
    subject, began_at = _subject(worker), clock.now()
    shown, is_told = "", False
    while True:
        passed_s = clock.now() - began_at
        command = DrainWorker() if is_told else _first_command(options, passed_s)
        try:
            state = await bus.request(subject, command, DrainState, timeout_s=REPLY_TIMEOUT_S)
        except NoResponders:
            show(f"{worker.process_id}: stopped")
            return True
        except RequestTimeout:
            state = None
        line = f"{worker.process_id}: {described(state, is_undone=options.is_undone)}"
        if line != shown:
            show(shown := line)
        if state is not None and (state.is_safe or options.is_undone):
            return True
        if clock.now() - began_at >= options.timeout_s:
            return False
        is_told |= state is not None
        await clock.sleep(POLL_S)


def _first_command(options: DrainOptions, passed_s: float) -> DrainWorker:
    hand_over_s = max(0.0, options.hand_over_s - passed_s)
    return DrainWorker(hand_over_s=hand_over_s, is_undone=options.is_undone)


def _subject(process: Heartbeat) -> str:
    if process.host is not None:
        return host_models(process.process_id)
    return lifecycle(process.roles[0], process.process_id)


def described(state: DrainState | None, *, is_undone: bool) -> str:
    """Returns what to show of a worker; None: it has not answered."""
    if state is None:
        return "does not answer"
    if is_undone:
        return "serves again"
    if state.is_safe:
        return SAFE
    return f"{state.num_running} requests run, {state.num_pushes} prompts are pushed"

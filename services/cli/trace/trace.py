"""Asks every live gateway for a timeline, and prints the one that is found."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterable

import msgspec

from services.cli.fleet.gateway_reads import live_gateways, read_fleet
from services.cli.nats_address import find_nats
from services.cli.output import table_console
from services.cli.trace.timeline_table import timeline_parts
from services.local.credentials import process_id_for
from shared.errors import ConfigError, DependencyUnavailable, HearthError
from shared.lifecycle.health import HEARTBEAT_INTERVAL_S
from shared.messages import Heartbeat, ReadTimeline, TimelineRead
from shared.subjects import HEARTBEATS, credential_of, trace
from shared.telemetry.log import configure_logging
from shared.telemetry.timeline import Timeline
from shared.tls import TlsFiles
from shared.transport.bus import NatsBus

LISTEN_S = 3 * HEARTBEAT_INTERVAL_S  # waits for a heartbeat of every gateway
REPLY_TIMEOUT_S = 1.0


class FoundTimeline(msgspec.Struct, frozen=True):
    """The result of a search. `missing` gateways did not reply; any of them may know
    the request.
    """

    timeline: Timeline | None
    missing: tuple[str, ...]


def run_trace(nats_url: str | None, request_id: str, *, is_json: bool) -> int:
    """Returns the exit status: 1 for an unknown request. Raises ConfigError and
    DependencyUnavailable.
    """
    if not 0 < len(request_id) <= 256:
        raise ConfigError("REQUEST_ID must have 1 to 256 characters")
    configure_logging("trace", level="error")  # not that the connection has been closed
    found = asyncio.run(_find(find_nats(nats_url), request_id))
    if found.missing:
        print(f"no reply within 1 s: {', '.join(found.missing)}", file=sys.stderr)
    if found.timeline is None:
        print(f"no gateway knows the request {request_id!r}", file=sys.stderr)
        return 1
    if is_json:
        print(msgspec.json.encode(found.timeline).decode())
        return 0
    console = table_console()
    for part in timeline_parts(found.timeline, console.width):
        console.print(part)
    return 0


async def _find(nats_url: str, request_id: str) -> FoundTimeline:
    bus = await NatsBus.connect(
        nats_url,
        process_id=process_id_for("observer", nats_url),
        tls=TlsFiles.of_environ("NATS", os.environ),
    )
    try:
        return await find_timeline(bus, request_id)
    finally:
        await bus.close()


async def find_timeline(bus: NatsBus, request_id: str) -> FoundTimeline:
    """Searches the gateways for a request's timeline. Raises DependencyUnavailable if no gateway
    sends heartbeats, ConfigError if the credential may not read timelines.
    """
    read = await read_fleet(bus)
    ordered = await _observed_gateways(bus) if read is None else live_gateways(read)
    replies = await asyncio.gather(*(_ask(bus, each, request_id) for each in ordered))
    missing = [name for name, reply in zip(ordered, replies, strict=True) if reply is None]
    _check_permission(bus, map(trace, missing))
    known = (reply.timeline for reply in replies if reply is not None)
    found = next((timeline for timeline in known if timeline is not None), None)
    return FoundTimeline(found, tuple(missing))


async def _observed_gateways(bus: NatsBus) -> list[str]:
    """Returns the gateways that send a heartbeat within LISTEN_S. Raises as `find_timeline`."""
    gateway_ids: set[str] = set()

    def on_heartbeat(beat: Heartbeat) -> None:
        if "gateway" in beat.roles:
            gateway_ids.add(beat.process_id)

    leave = await bus.subscribe(HEARTBEATS, Heartbeat, on_heartbeat)
    await asyncio.sleep(LISTEN_S)
    await leave()
    _check_permission(bus, (HEARTBEATS,))
    if not gateway_ids:
        raise DependencyUnavailable(f"no gateway within {LISTEN_S:g} s: is the cluster running?")
    return sorted(gateway_ids)


def _check_permission(bus: NatsBus, subjects: Iterable[str]) -> None:
    """Raises ConfigError if the server has rejected one of the subjects."""
    if any(map(bus.has_denied, subjects)):
        raise ConfigError(
            f"the NATS credential {credential_of(bus.process_id)} may not read timelines: use one "
            "of an observer or an operator (`hearth credential observer`)"
        )


async def _ask(bus: NatsBus, gateway_id: str, request_id: str) -> TimelineRead | None:
    """Asks a gateway. Returns None if it does not reply."""
    question = ReadTimeline(request_id=request_id)
    try:
        return await bus.request(
            trace(gateway_id), question, TimelineRead, timeout_s=REPLY_TIMEOUT_S
        )
    except HearthError:
        return None

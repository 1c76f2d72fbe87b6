"""Observes a fleet: receives heartbeats, and asks the gateways what these do not show."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Sequence

import nats.errors

from services.cli.fleet.gateway_reads import (
    MAX_ASKED,
    ask_gateways,
    live_gateways,
    read_fleet,
    read_models,
)
from services.cli.fleet.report import FleetReport
from services.local.credentials import process_id_for
from shared.background import Background
from shared.clock import Clock
from shared.errors import DependencyUnavailable
from shared.fleet.fleet_view import FleetView
from shared.fleet.host_view import ModelView
from shared.fleet.read_fleet import FleetRead
from shared.lifecycle.health import HEARTBEAT_INTERVAL_S, TICK_S
from shared.lifecycle.host_models import ReceivedModels
from shared.messages import Heartbeat
from shared.nats_urls import without_password
from shared.subjects import HEARTBEATS
from shared.tls import TlsFiles
from shared.transport.bus import NatsBus

LISTEN_S = 1.2 * HEARTBEAT_INTERVAL_S  # a heartbeat of each process


@contextlib.asynccontextmanager
async def open_poll(nats_url: str, clock: Clock, *, timeout_s: float) -> AsyncIterator[FleetPoll]:
    """Connects within `timeout_s`, and yields a poll that receives heartbeats. Raises
    DependencyUnavailable.
    """
    bus = await NatsBus.connect(
        nats_url,
        process_id=process_id_for("observer", nats_url),
        timeout_s=timeout_s,
        tls=TlsFiles.of_environ("NATS", os.environ),
    )
    poll = FleetPoll(bus, clock, where=without_password(nats_url))
    try:
        await poll.start()
        yield poll
    finally:
        await poll.stop()
        await bus.close()


class FleetPoll:
    """Reports of a fleet. `where` is the address of its NATS, for errors."""

    def __init__(self, bus: NatsBus, clock: Clock, *, where: str) -> None:
        self._received = asyncio.Event()  # a heartbeat
        self._where = where
        self._bus = bus
        self._clock = clock
        self._view = FleetView()
        self._background = Background()
        self._models = ReceivedModels(bus, clock, self._background)
        self._gateways: dict[str, float] = {}  # uptimes in seconds, by id
        self._has_gateway = asyncio.Event()

    async def start(self) -> None:
        await self._bus.subscribe(HEARTBEATS, Heartbeat, self._on_heartbeat)
        self._background.start_own(self._judge())

    async def stop(self) -> None:
        await self._background.stop()

    async def first_report(
        self, longest_s: float, first_beat_s: float | None = None
    ) -> FleetReport:
        """Returns a report as soon as a gateway answers. If none does, it waits for heartbeats:
        with `first_beat_s` so long for the first one, then `longest_s`, so that speeds are known
        and the models of hosts.

        Raises DependencyUnavailable without a heartbeat.
        """
        read = await read_fleet(self._bus)
        if read is not None:
            self._gateways.update(dict.fromkeys(live_gateways(read), 0.0))
            self._gateways[read.gateway_id] = read.uptime_s  # until heartbeats tell
            return self._report(read, await self._models_of(read))
        if first_beat_s is not None:
            await self._first_heartbeat(first_beat_s)
        return await self._observed_report(longest_s)

    async def _first_heartbeat(self, timeout_s: float) -> None:
        """Waits for the first heartbeat, which a machine under load may delay for seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._received.wait()
        except TimeoutError:
            message = f"no heartbeat at {self._where} within {timeout_s:g} s"
            raise DependencyUnavailable(message) from None

    async def _observed_report(self, longest_s: float) -> FleetReport:
        began_at = self._clock.now()
        await self._clock.sleep(min(LISTEN_S, longest_s))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._has_gateway.wait(), longest_s)
        read = await self._read()
        if read is None or self._view.hosts():
            await self._clock.sleep(max(0.0, longest_s - (self._clock.now() - began_at)))
        return self._report(read)

    async def report(self) -> FleetReport:
        read = await self._read()
        return self._report(read, None if read is None else await self._models_of(read))

    async def _models_of(self, read: FleetRead) -> Sequence[ModelView] | None:
        """Asks the hosts for their models, unless heartbeats have brought them all."""
        observed = {each.process_id for each in self._view.hosts()}
        if observed.issuperset(each.process_id for each in read.hosts):
            return None
        return await read_models(self._bus, read.hosts)

    def _report(
        self, read: FleetRead | None, models: Sequence[ModelView] | None = None
    ) -> FleetReport:
        return FleetReport.of(
            self._view,
            read,
            self._clock.now(),
            models=models,
            is_connected=self._bus.is_connected,
        )

    def _on_heartbeat(self, beat: Heartbeat) -> None:
        self._view.observe(self._models.complete(beat), self._clock.now())
        if self._view.rows():
            self._received.set()
        if "gateway" in beat.roles and beat.state != "stopped":
            self._gateways[beat.process_id] = beat.uptime_s
            self._has_gateway.set()

    async def _read(self) -> FleetRead | None:
        """Asks the gateways that have run longest, and returns the reply of the oldest one."""
        if not self._bus.is_connected:
            return None
        live = [name for name in self._gateways if not self._view.is_lost(name)]
        oldest = sorted(live, key=lambda name: -self._gateways[name])[:MAX_ASKED]
        return next(iter(await ask_gateways(self._bus, oldest)), None)

    async def _judge(self) -> None:
        """Uses server round trips instead of heartbeat echoes, as an observer sends no
        heartbeats.
        """
        while True:
            with contextlib.suppress(nats.errors.Error, OSError):
                await self._bus.flush()
                self._view.echo(self._clock.now())
            self._view.tick(self._clock.now())
            await self._clock.sleep(TICK_S)

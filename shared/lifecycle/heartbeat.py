"""Sends this process's heartbeats and tracks the health of its peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from socket import gethostname

import structlog
from msgspec import structs

from shared.background import (
    Background,
    failed_alone,
    failing_alone,
    is_logged,
    num_failed_items,
)
from shared.clock import Clock
from shared.errors import HearthError, NameInUse, NoResponders
from shared.lifecycle.health import HEARTBEAT_INTERVAL_S, SILENCE_LIMIT_S, TICK_S, Fleet, Loss
from shared.lifecycle.heartbeat_numbers import HeartbeatNumbers
from shared.lifecycle.host_models import AnnouncedModels, ReceivedModels
from shared.lifecycle.identity import name_in_use
from shared.lifecycle.release import installed_release
from shared.messages import (
    Alive,
    EncoderCard,
    GatewayLoad,
    Heartbeat,
    HostLoad,
    IndexLoad,
    KvTargets,
    LinkLoad,
    ListHostModels,
    ModelCard,
    ProcessState,
    ReportAlive,
    Role,
    SchedulerLoad,
    StoreLoad,
    WorkerLoad,
    WorkerRole,
)
from shared.metrics.process_report import ProcessReport
from shared.randomness import Randomness
from shared.regions.region_check import RegionCheck
from shared.subjects import (
    HEARTBEATS,
    alive,
    gateway_at_site,
    heartbeat,
    is_at_site,
    list_host_models,
)
from shared.telemetry.log_limit import LogLimit
from shared.tenancy.refusals import Refusals
from shared.transport.bus import Bus
from shared.transport.timed_requests import TimedRequests

log = structlog.get_logger(__name__)

GATHER_S = 0.01  # far less than LATE_S
ALIVE_TIMEOUT_S = 0.2  # plus the round trip
UNDECIDED_S = 3.0  # the longest time for which two processes share an id
MAX_REMEMBERED_LOSSES = 1024
MEASURE_S = 1.0  # interval of the search for peers to probe

LostHandler = Callable[[str, Loss], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """Functions that a process calls for each heartbeat, to report the state of its engine, index,
    gateway, scheduler, host, Redis connection or links to other sites. None: it has none.
    """

    worker: Callable[[], WorkerLoad] | None = None
    index: Callable[[], IndexLoad] | None = None
    gateway: Callable[[], GatewayLoad] | None = None
    scheduler: Callable[[], SchedulerLoad] | None = None
    host: Callable[[], HostLoad] | None = None
    store: Callable[[], StoreLoad] | None = None
    links: Callable[[], tuple[LinkLoad, ...]] = tuple


NO_LOADS = Loads()


class HealthMonitor:
    """Sends heartbeats with what `loads` report.

    `requests` measures the round trip to each peer; peers in use are probed. Without `reads_models`
    the heartbeats of hosts have no models. `numbers` are those of heartbeats that this process has
    sent before.
    """

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        randomness: Randomness,
        *,
        roles: tuple[Role, ...],
        possible_roles: tuple[WorkerRole, ...] = (),
        region: str = "",
        model: ModelCard | None = None,
        kv_targets: KvTargets = (),
        loads: Loads = NO_LOADS,
        reads_models: bool = False,
        numbers: HeartbeatNumbers | None = None,
    ) -> None:
        self.requests = TimedRequests(bus, clock)
        self.refusals = Refusals(region, bus.regions.classes, LogLimit(clock.now))
        self._count_refusals_of(bus.regions, roles[0])
        self.state: ProcessState = "starting"
        self.encoder: EncoderCard | None = None  # with which it encodes images for others
        self._numbers = HeartbeatNumbers.random(randomness) if numbers is None else numbers
        self.epoch = self._numbers.epoch
        self.fleet = Fleet(bus.process_id, self.epoch)
        self.on_name_in_use: Callable[[NameInUse], None] = self._end_process
        self._last_of_other: Heartbeat | None = None  # another process with this one's id
        self._other_since = self._other_received_at = -inf  # the other's beats, without a gap
        self._is_other_reported = False
        self._started_at = clock.now()
        self._bus = bus
        self._clock = clock
        self._roles = roles
        self._possible_roles = possible_roles
        self._region = region
        self._model = model
        self._kv_targets = kv_targets
        self._loads = loads
        self._site_lines = LogLimit(clock.now)
        self._subject = heartbeat(roles, bus.process_id, region)
        self._host_name = gethostname()
        # Peers that may come back, the last one last, and whether their loss is a warning.
        self._lost_at: dict[str, tuple[float, bool]] = {}
        self._lost_handlers: list[LostHandler] = []
        self._heartbeat_handlers: list[Callable[[Heartbeat], None]] = []
        self._requested: set[str] = set()
        self._background = Background()
        self._announced = AnnouncedModels(clock)
        self._received = ReceivedModels(bus, clock, self._background) if reads_models else None

    def on_lost(self, handler: LostHandler) -> None:
        self._lost_handlers.append(handler)

    def on_heartbeat(self, handler: Callable[[Heartbeat], None]) -> None:
        self._heartbeat_handlers.append(handler)

    async def start(self) -> None:
        for role in self._possible_roles or self._roles[:1]:  # peers use the first announced role
            own = alive(role, self._bus.process_id)
            await self._bus.serve(own, ReportAlive, lambda _: self._alive())
        if self._loads.host is not None:
            own = list_host_models(self._bus.process_id)
            await self._bus.serve(
                own, ListHostModels, lambda each: self._announced.page(each.first)
            )
        await self._bus.subscribe(HEARTBEATS, Heartbeat, self.observe, gather_s=GATHER_S)
        self._background.start_own(self._beat())
        self._background.start_own(self._watch())
        self._background.start_own(self._measure())

    async def transition_to(self, state: ProcessState) -> None:
        """Announces the new state immediately, not with the next periodic heartbeat."""
        self.state = state
        await self._send()

    async def announce_roles(self, roles: tuple[Role, ...]) -> None:
        """Announces other roles immediately, of `possible_roles`."""
        self._roles = roles
        self._subject = heartbeat(roles, self._bus.process_id, self._region)
        await self._send()

    async def stop(self) -> None:
        await self._background.stop()
        await self.transition_to("stopped")

    def _alive(self) -> Alive:
        return Alive(epoch=self.epoch, host=self._host_name, uptime_s=self.uptime_s)

    @property
    def uptime_s(self) -> float:
        return self._clock.now() - self._started_at

    def observe(self, message: Heartbeat) -> None:
        """Takes a heartbeat: of a process of this site, or made of the state of another site."""
        if message.process_id == self._bus.process_id and message.epoch != self.epoch:
            self._on_same_name(message)
            return
        if self._received is not None:
            message = self._received.complete(message)
        loss = self.fleet.observe(message, self._clock.now())
        if loss is not None:
            self._lost(message.process_id, loss)
        if self.fleet.is_contested(message):
            return
        if message.process_id in self._lost_at:
            self._note_return(message)
        for handler in self._heartbeat_handlers:
            try:  # a context manager would cost as much as a handler
                handler(message)
            except BaseException as raised:
                failed_alone(raised, "heartbeat_not_handled", peer=message.process_id)

    def _on_same_name(self, message: Heartbeat) -> None:
        """Ends the younger of two processes with one id. The first heartbeat of the other may be
        the last one of a process that has gone.

        A heartbeat's age is that of its sending: where both ages differ by less than its way here,
        each takes itself for older. If both stay, the one with the lower epoch ends.
        """
        now = self._clock.now()
        last, self._last_of_other = self._last_of_other, message
        if now - self._other_received_at > SILENCE_LIMIT_S:
            self._other_since = now
        self._other_received_at = now
        if message.state == "stopped" or last is None or last.epoch != message.epoch:
            return
        if message.sequence_number <= last.sequence_number:
            return
        is_younger = (self.uptime_s, self.epoch) < (message.uptime_s, message.epoch)
        is_undecided = now - self._other_since > UNDECIDED_S
        if is_younger or (is_undecided and self.epoch < message.epoch):
            self.on_name_in_use(
                name_in_use(self._bus.process_id, "another connection", message.uptime_s)
            )
        elif not self._is_other_reported:
            self._is_other_reported = True
            log.error("name_in_use", by_epoch=message.epoch, its_uptime_s=round(message.uptime_s))

    def _end_process(self, error: NameInUse) -> None:
        async def fail() -> None:
            raise error

        self._background.start_own(fail())

    def _note_return(self, message: Heartbeat) -> None:
        """Logs that a lost peer is back, once it has started again, at the level of its loss."""
        if self.fleet.is_live(message.process_id) and message.state != "starting":
            lost_at, is_warning = self._lost_at.pop(message.process_id)
            away_s = round(self._clock.now() - lost_at, 1)
            write = log.warning if is_warning else log.info
            write("peer_returned", peer=message.process_id, after_s=away_s)

    def _log_loss(self, process_id: str, loss: Loss) -> None:
        if is_at_site(process_id):
            self._log_loss_at_site(process_id, loss)
            return
        if loss is Loss.STOPPED:
            self._lost_at.pop(process_id, None)
            log.info("peer_stopped", peer=process_id)
            return
        if loss is Loss.RESTARTED and process_id in self._lost_at:
            return  # its loss is in the log
        is_warning = not self._is_late_start(process_id, loss)
        write = log.warning if is_warning else log.info
        write("peer_lost", peer=process_id, loss=loss.value)
        self._lost_at.setdefault(process_id, (self._clock.now(), is_warning))
        if len(self._lost_at) > MAX_REMEMBERED_LOSSES:
            del self._lost_at[next(iter(self._lost_at))]

    def _log_loss_at_site(self, process_id: str, loss: Loss) -> None:
        """Logs one line for all models of a gateway, and one a minute: the peer is not trusted. A
        cut link has its own line.
        """
        if loss is not Loss.STOPPED:
            gateway, kind = gateway_at_site(process_id), loss.value
            self._site_lines.write(
                log.warning, "site_gateway_lost", f"{gateway} {kind}", gateway=gateway, loss=kind
            )

    def _is_late_start(self, process_id: str, loss: Loss) -> bool:
        """Whether the peer has not been ready yet: processes that start are silent for a while."""
        last = self.fleet.heartbeat_of(process_id)
        is_away = loss in (Loss.UNRESPONSIVE, Loss.DISCONNECTED)
        return is_away and last is not None and last.state == "starting"

    def _lost(self, process_id: str, loss: Loss) -> None:
        self._log_loss(process_id, loss)
        if self._received is not None and loss is not Loss.RESTARTED:
            self._received.forget(process_id)
        for handler in self._lost_handlers:
            with failing_alone("peer_loss_not_handled", peer=process_id):
                handler(process_id, loss)

    async def _beat(self) -> None:
        while True:
            await self._send()
            await self._clock.sleep(HEARTBEAT_INTERVAL_S)

    async def _watch(self) -> None:
        num_reconnects = self._bus.num_reconnects
        while True:
            await self._clock.sleep(TICK_S)
            if self._bus.num_reconnects != num_reconnects:
                num_reconnects = self._bus.num_reconnects
                self.fleet.bus_was_away(self._clock.now())
            for process_id, loss in self.fleet.tick(self._clock.now()):
                self._lost(process_id, loss)
            late: dict[str, list[Heartbeat]] = {}
            for last in self.fleet.late(self._clock.now()):
                late.setdefault(gateway_at_site(last.process_id), []).append(last)
            for peer, beats in late.items():
                if peer not in self._requested:
                    self._background.start_item(self._request(peer, beats), is_logged)

    async def _request(self, peer: str, late: Sequence[Heartbeat]) -> None:
        """Requests a reply from a late peer; `late` are its last heartbeats, of a gateway of
        another site one for each model. A peer that hangs does not reply: SILENCE_LIMIT_S applies
        to it.
        """
        self._requested.add(peer)
        num_reconnects = self._bus.num_reconnects
        try:
            await self._request_alive(peer, late[0].roles[0])
        except NoResponders:
            if self._bus.num_reconnects == num_reconnects:
                self._mark_disconnected(late)
        except HearthError as error:
            log.debug("peer_unresponsive", peer=peer, reason=error.code)
        finally:
            self._requested.discard(peer)

    def _mark_disconnected(self, late: Sequence[Heartbeat]) -> None:
        for last in late:
            loss = self.fleet.mark_disconnected(last, self._clock.now())
            if loss is not None:
                self._lost(last.process_id, loss)

    async def _measure(self) -> None:
        """Probes peers in use that have had no request for a while."""
        while True:
            await self._clock.sleep(MEASURE_S)
            for process_id in self.requests.round_trips.due_for_probe(self._clock.now()):
                self._background.start_item(self._probe(process_id), is_logged)

    async def _probe(self, process_id: str) -> None:
        last = self.fleet.heartbeat_of(process_id)
        if last is None and not is_at_site(process_id):  # a queue group, or a peer that has left
            return
        with suppress(HearthError):
            await self._request_alive(process_id, "decode" if last is None else last.roles[0])

    async def _request_alive(self, process_id: str, role: Role) -> None:
        await self.requests.request(
            process_id,
            alive(role, process_id),
            ReportAlive(),
            Alive,
            base_s=ALIVE_TIMEOUT_S,
            is_use=False,
        )

    def describe(self) -> Heartbeat:
        """This process's state now, as its next heartbeat reports it."""
        loads = self._loads
        return Heartbeat(
            process_id=self._bus.process_id,
            epoch=self.epoch,
            sequence_number=self._numbers.last,
            roles=self._roles,
            state=self.state,
            interval_s=HEARTBEAT_INTERVAL_S,
            region=self._region,
            load=None if loads.worker is None else loads.worker(),
            model=self._model,
            kv_targets=self._kv_targets,
            index=None if loads.index is None else loads.index(),
            num_impostors=self._bus.num_sender_mismatches,
            uptime_s=self.uptime_s,
            gateway=None if loads.gateway is None else loads.gateway(),
            scheduler=None if loads.scheduler is None else loads.scheduler(),
            possible_roles=self._possible_roles,
            host=None if loads.host is None else loads.host(),
            release=installed_release(),
            num_bus_reconnects=self._bus.num_reconnects,
            num_failed_items=num_failed_items(),
            store=None if loads.store is None else loads.store(),
            host_name=self._host_name,
            links=loads.links(),
            refusals=self.refusals.last(),
            num_refusals=tuple(self.refusals.totals.items()),
            encoder=self.encoder,
        )

    def _count_refusals_of(self, regions: RegionCheck, role: Role) -> None:
        """Counts what the bus of this process refuses, and what NATS refuses it."""
        own = self.refusals.region
        regions.on_refused = lambda tenant_id: self.refusals.count(role, tenant_id, own)
        regions.on_denied = lambda _: self.refusals.count("bus", "", own)

    def report(self) -> ProcessReport:
        return ProcessReport(self.describe(), takes_work=self.state == "ready")

    async def _send(self) -> None:
        self._numbers.take()
        try:
            described = self.describe()
            if described.host is not None:
                announced = self._announced.announced(described.host)
                described = structs.replace(described, host=announced)
            await self._bus.publish(self._subject, described)
        except HearthError as error:  # for example a registry too large for the bus
            log.warning("heartbeat_send_failed", error=error.message)

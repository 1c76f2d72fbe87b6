"""The cluster as the page shows it: processes, models, events and speeds, as snapshots and deltas.
No I/O.

A delta has the changed fields of each process; null removes a field. Lists that changed are sent
whole. Events of gateways are differences between their counters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import inf
from typing import Any

import msgspec

from services.gateway.operator.cluster.changes import FleetChanges, registry_changes
from services.gateway.operator.cluster.events import ClusterEvent, EventLog
from services.gateway.operator.cluster.history import FleetFigures, FleetHistory
from services.gateway.operator.cluster.rejected_day import RejectedDay, RejectedHour
from services.gateway.operator.cluster.rejections import Rejections
from shared.fleet.fleet_view import FleetView, ProcessView
from shared.fleet.host_view import HostView, ModelView
from shared.fleet.link_view import LinkView
from shared.fleet.read_fleet import Rejection
from shared.fleet.tenant_views import TenantRefusal, TenantSite
from shared.lifecycle.health import Fleet, Loss
from shared.messages import GatewayLoad, Heartbeat, RoleDemand
from shared.model_registry.record import RegisteredModel
from shared.sites.site_states import models_of_sites
from shared.subjects import is_at_site

LINKS_S = 5.0
START_S = 5.0  # a process that started so shortly before the restored history has joined since
MAX_LOST = 1024  # lost processes of which a later heartbeat is a return
Fields = dict[str, Any]


class ClusterLists(msgspec.Struct, frozen=True, kw_only=True):
    """The lists that each delta contains in full. `figures`: all gateways, last minute."""

    figures: FleetFigures | None
    rejected: tuple[Rejection, ...]
    hosts: tuple[HostView, ...]
    models: tuple[ModelView, ...]
    demands: tuple[RoleDemand, ...]
    links: tuple[LinkView, ...]


class ClusterSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """`number` is that of the last delta that it contains. `samples` are of the last minutes."""

    number: int
    gateway_id: str
    processes: dict[str, Fields]
    events: tuple[ClusterEvent, ...]
    samples: tuple[FleetFigures, ...]
    lists: ClusterLists


class ClusterDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    number: int
    changed: dict[str, Fields] = {}
    removed: tuple[str, ...] = ()
    events: tuple[ClusterEvent, ...] = ()
    samples: tuple[FleetFigures, ...] = ()
    lists: Fields = {}  # the changed ones of ClusterLists


class _Sent(msgspec.Struct, frozen=True, kw_only=True):
    """The state at the last delta."""

    processes: dict[str, Fields] = {}
    last_event: int = 0
    num_samples: int = 0
    lists: ClusterLists


class ClusterView:
    """`now` and `wall` return seconds, `wall` those since 1970."""

    def __init__(self, fleet: Fleet, now: Callable[[], float], wall: Callable[[], float]) -> None:
        self._fleet = fleet
        self._view = FleetView(fleet)
        self._own_id = fleet.own_process_id
        self._now = now
        self._wall = wall
        self._loads: dict[str, tuple[int, GatewayLoad]] = {}  # epoch and counters by gateway
        self._started: dict[str, tuple[int, float]] = {}  # epoch and Unix time by process
        self._changes = FleetChanges()
        self._registry: Mapping[str, RegisteredModel] | None = None
        self._began_at = -inf  # with the history of an earlier process: the time of its restoring
        self._lost: dict[str, None] = {}  # ids of lost processes, the last one last
        self.events = EventLog(wall)
        self.history = FleetHistory(now, wall)
        self.rejected_day = RejectedDay(wall)
        self._rejections = Rejections(wall, self.rejected_day.add)
        self._last_links: tuple[tuple[LinkView, ...], float] = (), -inf
        self._sent = _Sent(lists=self._lists())
        self._number = 0

    def observe(self, heartbeat: Heartbeat) -> None:
        """Other sites are links, and their gateways no processes of this cluster."""
        process_id = heartbeat.process_id
        if is_at_site(process_id):
            return
        was_known = process_id in self._view
        was_lost = was_known and self._view.is_lost(process_id)
        self._view.observe(heartbeat, self._now())
        if heartbeat.state == "stopped":
            self._lost.pop(process_id, None)
            if was_known:
                self.events.add(Loss.STOPPED.value, process_id)
        elif not was_known and process_id in self._view and process_id not in self._lost:
            if heartbeat.uptime_s <= self._now() - self._began_at + START_S:
                self.events.add("joined", process_id)
        elif (was_lost or not was_known) and self._is_live(process_id):
            self._lost.pop(process_id, None)
            self.events.add("returned", process_id)
        for change in self._changes.observe(heartbeat):
            self.events.add(change.kind, change.process_id, detail=change.detail)
        self._note_start(heartbeat)
        if heartbeat.gateway is not None:
            self._count(heartbeat, heartbeat.gateway)
            self._forget()

    def _is_live(self, process_id: str) -> bool:
        return process_id in self._view and not self._view.is_lost(process_id)

    def observe_registry(self, models: Mapping[str, RegisteredModel]) -> None:
        """Records the difference to the models of the last call."""
        before, self._registry = self._registry, models
        if before is not None:
            for kind, name in registry_changes(before, models):
                self.events.add(kind, name)

    def restore(
        self,
        events: Iterable[ClusterEvent],
        samples: Iterable[FleetFigures],
        rejected: Iterable[RejectedHour] = (),
    ) -> None:
        """Continues the history of an earlier process; processes that were up before this one have
        joined then.
        """
        self.events.restore(events)
        self.history.restore(samples)
        self.rejected_day.restore(rejected)
        if self.events.last_number:
            self._began_at = self._now()

    def lose(self, process_id: str, loss: Loss) -> None:
        if is_at_site(process_id):
            return
        self._view.lose(process_id, loss, self._now())
        self._lost[process_id] = None
        if len(self._lost) > MAX_LOST:
            del self._lost[next(iter(self._lost))]
        if loss is not Loss.STOPPED:  # `observe` adds this event
            self.events.add(loss.value, process_id)

    def snapshot(self) -> ClusterSnapshot:
        """Returns the current state."""
        return self._snapshot(self._present())

    def last(self) -> ClusterSnapshot:
        """Returns the state of the last delta, so that the next delta follows it."""
        return self._snapshot(self._sent)

    def _snapshot(self, state: _Sent) -> ClusterSnapshot:
        samples = self.history.samples
        num_unsent = self.history.num_samples - state.num_samples
        return ClusterSnapshot(
            number=self._number,
            gateway_id=self._own_id,
            processes=state.processes,
            events=self.events.between(0, state.last_event),
            samples=samples[: max(0, len(samples) - num_unsent)],
            lists=state.lists,
        )

    def delta(self) -> ClusterDelta:
        """Returns the changes since the last call."""
        before, now = self._sent, self._present()
        self._sent = now
        self._number += 1
        return ClusterDelta(
            number=self._number,
            changed=_changes(before.processes, now.processes),
            removed=tuple(before.processes.keys() - now.processes.keys()),
            events=self.events.between(before.last_event, now.last_event),
            samples=self.history.last(now.num_samples - before.num_samples),
            lists=_changed(_shallow(before.lists), _shallow(now.lists)),
        )

    def _present(self) -> _Sent:
        return _Sent(
            processes=self._processes(),
            last_event=self.events.last_number,
            num_samples=self.history.num_samples,
            lists=self._lists(),
        )

    def _lists(self) -> ClusterLists:
        models = (msgspec.structs.replace(each, hot_s=0.0) for each in self._view.models())
        return ClusterLists(
            figures=self.history.current,
            rejected=self._rejections.rows,
            hosts=self.hosts(),
            models=tuple(models),
            demands=self.demands(),
            links=self._shown_links(),
        )

    def _shown_links(self) -> tuple[LinkView, ...]:
        """Returns the links as a delta sends them: their times and speeds every LINKS_S."""
        links, now = self.links(), self._now()
        before, at = self._last_links
        if now - at >= LINKS_S or _states(links) != _states(before):
            self._last_links = links, now
        return self._last_links[0]

    @property
    def recent_rejections(self) -> tuple[Rejection, ...]:
        return self._rejections.recent

    def rows(self) -> list[ProcessView]:
        """Returns all processes, and those that were lost."""
        now = self._now()
        self._view.forget(now)
        return self._view.rows(now)

    def hosts(self) -> tuple[HostView, ...]:
        return tuple(self._view.hosts())

    def demands(self) -> tuple[RoleDemand, ...]:
        return tuple(self._view.demands())

    def links(self) -> tuple[LinkView, ...]:
        return tuple(self._view.links(models_of_sites(self._fleet)))

    def tenant_sites(self) -> tuple[TenantSite, ...]:
        return tuple(self._view.tenant_sites())

    def tenant_refusals(self) -> tuple[TenantRefusal, ...]:
        return tuple(self._view.tenant_refusals())

    def _processes(self) -> dict[str, Fields]:
        return {each.process_id: self._fields(each) for each in self.rows()}

    def _forget(self) -> None:
        """Forgets processes that have gone; also while nobody reads the state."""
        self._view.forget(self._now())
        for known in (self._started, self._loads):
            for process_id in [each for each in known if each not in self._view]:
                del known[process_id]
                self.history.forget(process_id)
                self._changes.forget(process_id)

    def _fields(self, view: ProcessView) -> Fields:
        fields: Fields = msgspec.to_builtins(view)
        del fields["process_id"]
        started = self._started.get(view.process_id)
        return fields if started is None else {**fields, "started_at": started[1]}

    def _note_start(self, heartbeat: Heartbeat) -> None:
        """Records the start once: each heartbeat would give another fraction of a second."""
        known = self._started.get(heartbeat.process_id)
        if known is None or known[0] != heartbeat.epoch:
            started_at = round(self._wall() - heartbeat.uptime_s)
            self._started[heartbeat.process_id] = heartbeat.epoch, started_at

    def _count(self, heartbeat: Heartbeat, load: GatewayLoad) -> None:
        gateway_id, epoch = heartbeat.process_id, heartbeat.epoch
        self.history.observe(gateway_id, epoch, load)
        known = self._loads.get(gateway_id)
        self._loads[gateway_id] = epoch, load
        if known is None:
            return
        before = known[1] if known[0] == epoch else GatewayLoad()
        self._rejections.count(gateway_id, before, load)
        self._add_moved(gateway_id, before, load)
        num_lost = load.num_lost_streams - before.num_lost_streams
        if num_lost > 0:
            self.events.add("stream lost", gateway_id, num_lost, gateway_id=gateway_id)

    def _add_moved(self, gateway_id: str, before: GatewayLoad, load: GatewayLoad) -> None:
        """Adds moved streams by the worker that had them, and the others by their gateway."""
        rest, known = load.num_resubmissions - before.num_resubmissions, dict(before.moved_streams)
        for worker_id, count in load.moved_streams:
            num_moved = count - known.get(worker_id, 0)
            if num_moved > 0:
                self.events.add("moved", worker_id, num_moved, gateway_id=gateway_id)
                rest -= num_moved
        if rest > 0:
            self.events.add("moved", gateway_id, rest, gateway_id=gateway_id)


def _states(links: Iterable[LinkView]) -> list[tuple[str, bool]]:
    return [(each.site, each.is_cut) for each in links]


def _shallow(lists: ClusterLists) -> Fields:
    return msgspec.structs.asdict(lists)


def _changes(before: dict[str, Fields], after: dict[str, Fields]) -> dict[str, Fields]:
    found = {name: _changed(before.get(name, {}), fields) for name, fields in after.items()}
    return {name: fields for name, fields in found.items() if fields}


def _changed(before: Fields, after: Fields) -> Fields:
    changed = {name: value for name, value in after.items() if before.get(name) != value}
    return changed | dict.fromkeys(before.keys() - after.keys())

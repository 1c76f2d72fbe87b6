"""The models of hosts, in heartbeats as changes, and whole on request.

    host:  a change ──▶ version + 1 ──▶ in each heartbeat for RESEND_S ──▶ only the version
    peer:  knows `changed_since` or later ──▶ applies the changes; else requests the list, in pages

A heartbeat has the same size whatever the model registry's. Peers that need no models request none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import structlog
from msgspec.structs import replace

from shared.background import Background, is_logged
from shared.clock import Clock
from shared.errors import HearthError
from shared.messages import Heartbeat, HostedModel, HostLoad, HostModelPage, ListHostModels
from shared.subjects import list_host_models
from shared.transport.bus import Bus

log = structlog.get_logger(__name__)

RESEND_S = 1.0  # each change: four heartbeats, of which some may be lost
MAX_CHANGES = 64  # changes in one heartbeat; if there are more, peers request the list
PAGE_MODELS = 256
MAX_HOSTS = 1024  # hosts whose models are stored
REQUEST_TIMEOUT_S = 1.0
MAX_REASON_CHARS = 300  # characters of a failure
_Key = tuple[str, str]


class AnnouncedModels:
    """The models of one host, as its heartbeats announce them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._version = self._since = 0
        self._models: dict[_Key, HostedModel] = {}
        self._changed: dict[_Key, tuple[int, float]] = {}  # version and time, oldest first

    def announced(self, load: HostLoad) -> HostLoad:
        """Returns `load` with the changes of the last RESEND_S in place of all models."""
        now = self._clock.now()
        self._take({_key(each): _with_short_reasons(each) for each in load.models}, now)
        while self._changed:
            key = next(iter(self._changed))
            version, changed_at = self._changed[key]
            if now - changed_at <= RESEND_S and len(self._changed) <= MAX_CHANGES:
                break
            self._since = max(self._since, version)
            del self._changed[key]
        changed = [key for key, (version, _) in self._changed.items() if version > self._since]
        return HostLoad(
            devices=load.devices,
            models_version=self._version,
            changed_since=self._since,
            changed=tuple(self._models[key] for key in changed if key in self._models),
            removed=tuple(key for key in changed if key not in self._models),
        )

    def page(self, first: int) -> HostModelPage:
        models = tuple(self._models.values())
        return HostModelPage(
            version=self._version,
            num_models=len(models),
            models=models[first : first + PAGE_MODELS],
        )

    def _take(self, models: dict[_Key, HostedModel], now: float) -> None:
        known = self._models
        changed = [key for key, each in models.items() if not _is_same(known.get(key), each)]
        changed += known.keys() - models.keys()
        self._models = models
        if changed:
            self._version += 1
        for key in changed:
            self._changed.pop(key, None)
            self._changed[key] = (self._version, now)


@dataclass(slots=True)
class _Known:
    """Received models of a host, each with the time at which it was received."""

    epoch: int
    version: int = 0
    models: dict[_Key, tuple[HostedModel, float]] = field(default_factory=dict)

    def put(self, models: Iterable[HostedModel], now: float) -> None:
        self.models.update((_key(each), (each, now)) for each in models)


class ReceivedModels:
    """Puts the models back into the heartbeats of hosts."""

    def __init__(self, bus: Bus, clock: Clock, background: Background) -> None:
        self._bus = bus
        self._clock = clock
        self._background = background
        self._known: dict[str, _Known] = {}
        self._requested: set[str] = set()

    def complete(self, heartbeat: Heartbeat) -> Heartbeat:
        """Adds all models that are known to a heartbeat. Those of a host that is new here follow
        with the next heartbeats: its list is requested.
        """
        load, host_id = heartbeat.host, heartbeat.process_id
        if load is None or not load.models_version:
            return heartbeat
        known = self._known.pop(host_id, None)
        if known is None or known.epoch != heartbeat.epoch:
            known = _Known(heartbeat.epoch)
        self._known[host_id] = known
        if len(self._known) > MAX_HOSTS:  # the one that was silent longest
            del self._known[next(iter(self._known))]
        now = self._clock.now()
        if load.changed_since <= known.version <= load.models_version:
            known.put(load.changed, now)
            for key in load.removed:
                known.models.pop(key, None)
            known.version = load.models_version
        elif known.version < load.changed_since and host_id not in self._requested:
            self._requested.add(host_id)
            self._background.start_item(self._request(host_id, known), is_logged)
        models = tuple(_aged(each, now - at) for each, at in known.models.values())
        return replace(heartbeat, host=HostLoad(devices=load.devices, models=models))

    def forget(self, host_id: str) -> None:
        self._known.pop(host_id, None)

    async def _request(self, host_id: str, known: _Known) -> None:
        try:
            received = await read_host_models(self._bus, host_id)
        except HearthError as error:
            log.debug("host_models_not_received", host=host_id, reason=error.message)
            return
        finally:
            self._requested.discard(host_id)
        version, models = received
        if version >= known.version:
            known.version, known.models = version, {}
            known.put(models, self._clock.now())


async def read_host_models(bus: Bus, host_id: str) -> tuple[int, list[HostedModel]]:
    """Returns the list of a host with its version. It begins again if the list changes meanwhile.

    Raises the errors of `Bus.request`.
    """
    found: list[HostedModel] = []
    version = -1
    while True:
        page = await bus.request(
            list_host_models(host_id),
            ListHostModels(first=len(found)),
            HostModelPage,
            timeout_s=REQUEST_TIMEOUT_S,
        )
        if found and page.version != version:
            found = []
            continue
        version = page.version
        found += page.models
        if not page.models or len(found) >= page.num_models:
            return version, found


def _key(model: HostedModel) -> _Key:
    return model.name, model.revision


def _is_same(known: HostedModel | None, model: HostedModel) -> bool:
    """Whether both are equal, but for the time that passes by itself."""
    return known is not None and (
        known == model or replace(known, hot_s=0.0) == replace(model, hot_s=0.0)
    )


def _aged(model: HostedModel, age_s: float) -> HostedModel:
    return replace(model, hot_s=model.hot_s + age_s) if model.state == "hot" else model


def _with_short_reasons(model: HostedModel) -> HostedModel:
    if max(len(model.failure), len(model.public_failure)) <= MAX_REASON_CHARS:
        return model
    return replace(
        model, failure=_short(model.failure), public_failure=_short(model.public_failure)
    )


def _short(reason: str) -> str:
    return reason if len(reason) <= MAX_REASON_CHARS else f"{reason[: MAX_REASON_CHARS - 1]}…"

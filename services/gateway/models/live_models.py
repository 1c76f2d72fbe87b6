"""The models that the cluster serves, and its readiness to serve requests, from heartbeats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from math import inf

import msgspec
import structlog

from services.gateway.models.card_selection import HOLD_S, CardSelection
from shared.clock import Clock
from shared.errors import NoCapacity, UnknownModel
from shared.lifecycle.health import Fleet
from shared.messages import Heartbeat, HostLoad, ModelCard, Role
from shared.subjects import is_at_site

log = structlog.get_logger(__name__)

START_S = 5.0  # seconds, for a model that no host has started yet

Revision = tuple[str, str]  # a model's name and revision


class ReadyWorkers(msgspec.Struct, frozen=True, omit_defaults=True):
    prefill: list[str]
    decode: list[str]
    encode: list[str] = []
    """Only those that encode images alone."""


class PublicReadiness(msgspec.Struct, frozen=True, kw_only=True):
    ready: bool
    """Whether a request would be served now."""
    reason: str | None
    """Why not."""
    redis: str
    """If `unavailable`, `empty` or `new`, only known tenants are served; if `rejects writes`,
    limits are this gateway's own.
    """


class Readiness(PublicReadiness, frozen=True, kw_only=True):
    """The readiness with the names of processes, for the operator alone."""

    workers: ReadyWorkers
    scheduler: list[str]
    kv_index: list[str]

    @property
    def public(self) -> PublicReadiness:
        return PublicReadiness(ready=self.ready, reason=self.reason, redis=self.redis)


class Catalog:
    """The cards of this gateway's own model, `name`, and of all other models by revision.

    Its own model has one card, and requests of it raise NoCapacity without workers. The revision of
    another model is chosen before, so its card is of that one: of live workers, else of a host that
    can start one.
    """

    def __init__(
        self, fleet: Fleet, name: str, clock: Clock, *, is_cold_started: bool = False
    ) -> None:
        """`name`: the gateway's own model; empty if it has none. `is_cold_started`: requests wait
        for the first worker of that model, so that its card stays without one.
        """
        self._fleet = fleet
        self._clock = clock
        self._is_cold_started = is_cold_started
        self._cards = CardSelection(
            inf if is_cold_started else HOLD_S
        )  # the cards of the gateway's own model
        self._others: dict[Revision, CardSelection] = {}
        self._places: dict[str, CardSelection] = {}  # the selection that has each worker's card
        self._block_sizes: dict[str, tuple[Revision, int]] = {}  # by worker, of any role
        self._hosts: dict[str, dict[Revision, ModelCard]] = {}
        self.name = name

    def observe(self, heartbeat: Heartbeat) -> None:
        """Records a heartbeat that the fleet has processed."""
        worker_id, now = heartbeat.process_id, self._clock.now()
        if self._fleet.heartbeat_of(worker_id) is not heartbeat:  # old, or above the peer limit
            return
        takes_work = self._fleet.is_live(worker_id) and heartbeat.state == "ready"
        self._observe_block_size(worker_id, heartbeat.model if takes_work else None)
        card = heartbeat.model if "decode" in heartbeat.roles and takes_work else None
        place = None if card is None else self._place(card, now)
        known = self._places.get(worker_id)
        if known is not None and known is not place:
            known.remove(worker_id, now)
            del self._places[worker_id]
        if card is not None and place is not None:
            place.put(worker_id, card, now)
            self._places[worker_id] = place
        if heartbeat.host is not None:
            self._hosts[worker_id] = _hosted(heartbeat.host) if takes_work else {}

    def _observe_block_size(self, worker_id: str, card: ModelCard | None) -> None:
        """Warns of the first worker of a revision with another block size: decode workers of the
        sizes with fewer workers get no requests, and KV goes only between equal sizes.
        """
        if card is None or is_at_site(worker_id):  # KV stays in its site
            self._block_sizes.pop(worker_id, None)
            return
        found = (card.name, card.revision), card.block_size
        if self._block_sizes.get(worker_id) == found:
            return
        self._block_sizes[worker_id] = found
        sizes = Counter(size for key, size in self._block_sizes.values() if key == found[0])
        if len(sizes) > 1 and sizes[card.block_size] == 1:
            log.warning(
                "block_sizes_differ",
                model=card.name,
                revision=card.revision,
                worker=worker_id,
                block_sizes=sorted(sizes),
                hint="give all workers of a model the same --block-size",
            )

    def lost(self, process_id: str) -> None:
        self._hosts.pop(process_id, None)
        self._block_sizes.pop(process_id, None)
        place = self._places.pop(process_id, None)
        if place is not None:
            place.remove(process_id, self._clock.now())

    def cards(self) -> list[ModelCard]:
        """Returns the card of the gateway's own model, if there is one."""
        card = self._cards.card(self._clock.now())
        return [] if card is None else [card]

    def card(self, model: str) -> ModelCard:
        """Returns the card of the gateway's own model. Raises UnknownModel, and NoCapacity if no
        worker was live lately.
        """
        if model != self.name:
            raise UnknownModel(f"the model {model!r} does not exist", param="model")
        card = self._cards.card(self._clock.now())
        if card is None:
            raise NoCapacity(f"no worker serves {model!r} now", retry_after_s=1.0)
        return card

    def card_of(self, model: str, revision: str) -> ModelCard | None:
        """Returns the card of another model, or None if no live worker serves this revision and no
        host can.
        """
        key = (model, revision)
        selection = self._others.get(key)
        card = None if selection is None else selection.card(self._clock.now())
        if card is not None:
            return card
        return next((cards[key] for cards in self._hosts.values() if key in cards), None)

    def start_s(self, model: str) -> float:
        """Returns the seconds until a host may serve the model, at least 1; a guess if no host
        reports them.
        """
        hosts = (each.host for each in self._fleet.live("host") if each.host is not None)
        found = (each.start_s for host in hosts for each in host.models if each.name == model)
        return max(1.0, min(filter(None, found), default=START_S))

    def failure_of(self, model: str, revisions: Collection[str]) -> str:
        """Returns why all live hosts with one of these revisions failed to load it, in the words of
        the first; else an empty text.
        """
        hosts = (each.host for each in self._fleet.live("host") if each.host is not None)
        models = (each for host in hosts for each in host.models if each.name == model)
        found = [each for each in models if each.revision in revisions]
        if any(each.state != "failed" for each in found):
            return ""
        return next((each.public_failure for each in found if each.public_failure), "")

    def _place(self, card: ModelCard, now: float) -> CardSelection:
        if card.name == self.name:
            return self._cards
        key = (card.name, card.revision)
        if key not in self._others:
            self._others = {k: each for k, each in self._others.items() if each.card(now)}
            self._others[key] = CardSelection()
        return self._others[key]

    def readiness(self, *, is_connected: bool, is_draining: bool, redis: str) -> Readiness:
        """Returns whether a request would be served now; `reason` names what is missing."""
        schedulers = self._ids("scheduler")
        reason = None
        if is_draining:
            reason = "draining"
        elif not is_connected:
            reason = "not connected to the bus"
        elif not schedulers:
            reason = "no live scheduler"
        elif not self.name and not self._decodes() and not self._ids("host"):
            reason = "no live worker and no host"
        elif self.name and not self._decodes():
            is_awaited = self._is_cold_started and self.cards()
            reason = None if is_awaited else "no live decode worker"
        elif self.name and not self._has_free_blocks():
            reason = "no decode worker has free blocks"
        return Readiness(
            ready=reason is None,
            reason=reason,
            workers=ReadyWorkers(
                prefill=self._ids("prefill"),
                decode=sorted(heartbeat.process_id for heartbeat in self._decodes()),
                encode=self._ids("encode"),
            ),
            scheduler=schedulers,
            kv_index=self._ids("kv_index"),
            redis=redis,
        )

    def _ids(self, role: Role) -> list[str]:
        return sorted(heartbeat.process_id for heartbeat in self._fleet.live(role))

    def _decodes(self) -> list[Heartbeat]:
        """Returns the last heartbeats of live workers that decode the gateway's model, or any model
        if it has none of its own.
        """
        live = self._fleet.live("decode")
        return [each for each in live if not self.name or _serves(each, self.name)]

    def has_feature(self, feature: str) -> bool:
        """Returns whether a live decode worker has the feature, or a host a model with it."""
        cards = [each.model for each in self._fleet.live("decode")]
        cards += [card for hosted in self._hosts.values() for card in hosted.values()]
        return any(card is not None and feature in card.features for card in cards)

    def _has_free_blocks(self) -> bool:
        loads = (heartbeat.load for heartbeat in self._decodes())
        return any(load is not None and load.num_free_blocks > 0 for load in loads)


def _hosted(host: HostLoad) -> dict[Revision, ModelCard]:
    """Returns the models that the host can serve now or soon."""
    cards = (each.card for each in host.models if each.state != "failed")
    return {(card.name, card.revision): card for card in cards if card is not None}


def _serves(heartbeat: Heartbeat, model: str) -> bool:
    return heartbeat.model is not None and heartbeat.model.name == model

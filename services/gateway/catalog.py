"""The models that the cluster serves, and its readiness to serve requests, from heartbeats."""

from __future__ import annotations

import msgspec

from services.gateway.card_selection import CardSelection
from shared.clock import Clock
from shared.errors import NoCapacity, UnknownModel
from shared.lifecycle.health import Fleet
from shared.messages import Heartbeat, ModelCard, Role


class ReadyWorkers(msgspec.Struct, frozen=True):
    prefill: list[str]
    decode: list[str]


class Readiness(msgspec.Struct, frozen=True):
    """`redis`: unless "ok", only tenants that this gateway has already served are served."""

    ready: bool
    reason: str | None
    workers: ReadyWorkers
    scheduler: list[str]
    kv_index: list[str]
    redis: str


class Catalog:
    """A gateway has the tokenizer of one model, `name`, and ignores workers of other models.

    Without workers, requests of this model raise NoCapacity, not UnknownModel.
    """

    def __init__(self, fleet: Fleet, name: str, clock: Clock) -> None:
        self._fleet = fleet
        self._clock = clock
        self._cards = CardSelection()
        self.name = name

    def observe(self, heartbeat: Heartbeat) -> None:
        """Call after the fleet has processed the heartbeat."""
        worker_id, now = heartbeat.process_id, self._clock.now()
        if self._fleet.heartbeat_of(worker_id) is not heartbeat:  # old, or above the peer limit
            return
        takes_work = self._fleet.is_live(worker_id) and heartbeat.state == "ready"
        card = heartbeat.model if "decode" in heartbeat.roles and takes_work else None
        if card is None or card.name != self.name:
            self._cards.remove(worker_id, now)
        else:
            self._cards.put(worker_id, card, now)

    def lost(self, worker_id: str) -> None:
        self._cards.remove(worker_id, self._clock.now())

    def cards(self) -> list[ModelCard]:
        """The card of `card`, if there is one."""
        card = self._cards.card(self._clock.now())
        return [] if card is None else [card]

    def card(self, model: str) -> ModelCard:
        """Raises UnknownModel, or NoCapacity if no worker of the model was live lately."""
        if model != self.name:
            raise UnknownModel(f"the model {model!r} does not exist", param="model")
        card = self._cards.card(self._clock.now())
        if card is None:
            raise NoCapacity(f"no worker serves {model!r} now", retry_after_s=1.0)
        return card

    def readiness(self, *, is_connected: bool, is_draining: bool, redis: str) -> Readiness:
        """Ready means that a request would be served now; `reason` names what is missing."""
        schedulers = self._ids("scheduler")
        reason = None
        if is_draining:
            reason = "draining"
        elif not is_connected:
            reason = "not connected to the bus"
        elif not schedulers:
            reason = "no live scheduler"
        elif not self._decodes():
            reason = "no live decode worker"
        elif not self._has_free_blocks():
            reason = "no decode worker has free blocks"
        return Readiness(
            ready=reason is None,
            reason=reason,
            workers=ReadyWorkers(
                prefill=self._ids("prefill"),
                decode=sorted(heartbeat.process_id for heartbeat in self._decodes()),
            ),
            scheduler=schedulers,
            kv_index=self._ids("kv_index"),
            redis=redis,
        )

    def _ids(self, role: Role) -> list[str]:
        return sorted(heartbeat.process_id for heartbeat in self._fleet.live(role))

    def _decodes(self) -> list[Heartbeat]:
        return [each for each in self._fleet.live("decode") if _serves(each, self.name)]

    def _has_free_blocks(self) -> bool:
        loads = (heartbeat.load for heartbeat in self._decodes())
        return any(load is not None and load.num_free_blocks > 0 for load in loads)


def _serves(heartbeat: Heartbeat, model: str) -> bool:
    return heartbeat.model is not None and heartbeat.model.name == model

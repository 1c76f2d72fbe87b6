"""The models that the cluster serves, and whether it would serve a request: from heartbeats."""

from __future__ import annotations

import msgspec

from shared.errors import UnknownModel
from shared.health import Fleet
from shared.messages import Heartbeat, ModelCard, Role


class ReadyWorkers(msgspec.Struct, frozen=True):
    prefill: list[str]
    decode: list[str]


class Readiness(msgspec.Struct, frozen=True):
    ready: bool
    reason: str | None
    workers: ReadyWorkers
    scheduler: list[str]
    kv_index: list[str]


class Catalog:
    """A model once seen stays known: when its workers are gone it lacks capacity, not existence."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._known: dict[str, ModelCard] = {}

    def observe(self, heartbeat: Heartbeat) -> None:
        if heartbeat.model is not None and "decode" in heartbeat.roles:
            self._known[heartbeat.model.name] = heartbeat.model

    def live_cards(self) -> list[ModelCard]:
        models = [heartbeat.model for heartbeat in self._fleet.live("decode")]
        cards = {model.name: model for model in models if model is not None}
        return sorted(cards.values(), key=lambda card: card.name)

    def card(self, model: str) -> ModelCard:
        """Raises UnknownModel for a name that no worker has had since the start."""
        known = self._known.get(model)
        if known is None:
            raise UnknownModel(f"the model {model!r} does not exist", param="model")
        return known

    def readiness(self, *, is_connected: bool, is_draining: bool) -> Readiness:
        """Ready is what would serve a request that came now."""
        schedulers = self._ids("scheduler")
        reason = None
        if is_draining:
            reason = "draining"
        elif not is_connected:
            reason = "not connected to the bus"
        elif not schedulers:
            reason = "no live scheduler"
        elif not self._ids("decode"):
            reason = "no live decode worker"
        elif not self._has_free_blocks():
            reason = "no decode worker has free blocks"
        return Readiness(
            ready=reason is None,
            reason=reason,
            workers=ReadyWorkers(prefill=self._ids("prefill"), decode=self._ids("decode")),
            scheduler=schedulers,
            kv_index=self._ids("kv_index"),
        )

    def _ids(self, role: Role) -> list[str]:
        return sorted(heartbeat.process_id for heartbeat in self._fleet.live(role))

    def _has_free_blocks(self) -> bool:
        loads = (heartbeat.load for heartbeat in self._fleet.live("decode"))
        return any(load is not None and load.num_free_blocks > 0 for load in loads)

"""The hosts, by their last heartbeats, and which models they can serve. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.backlog import Lane
from services.scheduler.residency.view import ModelId
from shared.messages import Heartbeat, HostedModel, HostLoad

HOST_RETURN_S = 10.0  # requests wait so long for a lost host to come back


@dataclass(slots=True)
class KnownHost:
    host_id: str
    region: str
    load: HostLoad
    received_at: float
    lost_at: float | None = None
    is_ready: bool = True


class Hosts:
    """A host may name a revision otherwise than requests do, by the digest of its weights: its
    card, or that of another host, has the digest.
    """

    def __init__(self) -> None:
        self._known: dict[str, KnownHost] = {}
        self._digests: dict[tuple[str, str], str] = {}  # by name and revision of hosts

    def __len__(self) -> int:
        return len(self._known)

    def observe(self, heartbeat: Heartbeat, now: float) -> None:
        if heartbeat.host is not None:
            self._known[heartbeat.process_id] = KnownHost(
                heartbeat.process_id,
                heartbeat.region,
                heartbeat.host,
                now,
                is_ready=heartbeat.state == "ready",
            )
            for each in heartbeat.host.models:
                if each.card is not None:
                    self._digests[each.name, each.revision] = each.card.revision

    def model_of(self, hosted: HostedModel) -> ModelId:
        name, revision = hosted.name, hosted.revision
        return name, self._digests.get((name, revision), revision)

    def revision_of(self, host_id: str, model: ModelId) -> str:
        """As the host names it."""
        known = self._known.get(host_id)
        models = () if known is None else known.load.models
        found = (each.revision for each in models if self.model_of(each) == model)
        return next(found, model[1])

    def lost(self, host_id: str, now: float) -> None:
        if host_id in self._known:
            self._known[host_id].lost_at = now

    def live(self) -> list[KnownHost]:
        """Those that carry out wakes."""
        return [each for each in self._known.values() if each.lost_at is None and each.is_ready]

    def serving(self, lane: Lane, num_context_tokens: int) -> frozenset[str]:
        """Hosts, also those that may come back, that can serve such a request."""
        known = self._known.values()
        return frozenset(
            each.host_id
            for each in known
            if not lane.regions or each.region in lane.regions
            if any(self._fits(hosted, lane, num_context_tokens) for hosted in each.load.models)
        )

    def forget_lost(self, now: float) -> None:
        for host_id, each in list(self._known.items()):
            if each.lost_at is not None and now - each.lost_at > HOST_RETURN_S:
                del self._known[host_id]
        if not self._known:
            self._digests.clear()

    def _fits(self, hosted: HostedModel, lane: Lane, num_context_tokens: int) -> bool:
        card = hosted.card
        if hosted.state == "failed" or self.model_of(hosted) != (lane.model, lane.revision):
            return False
        if card is None:  # never started there
            return True
        has_features = frozenset(lane.needs) <= frozenset(card.features)
        has_context = num_context_tokens <= card.max_context_tokens
        return card.block_size == lane.block_size and has_features and has_context

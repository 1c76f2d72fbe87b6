"""The hosts, by their last heartbeats, and which models they can serve. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.backlog import QueueKey
from services.scheduler.residency.view import ModelId
from shared.messages import Heartbeat, HostedModel, HostLoad

HOST_RETURN_S = 10.0  # requests wait so long for a lost host to come back


@dataclass(slots=True)
class KnownHost:
    heartbeat: Heartbeat
    load: HostLoad
    received_at: float
    lost_at: float | None = None

    @property
    def host_id(self) -> str:
        return self.heartbeat.process_id

    @property
    def region(self) -> str:
        return self.heartbeat.region

    def is_before(self, heartbeat: Heartbeat) -> bool:
        known = self.heartbeat
        is_same = known.epoch == heartbeat.epoch
        return not is_same or known.sequence_number < heartbeat.sequence_number


class Hosts:
    """The hosts and their models. A host may name a revision by its own name and requests by the
    digest of its weights, which the card of that host, or of another one, has.
    """

    def __init__(self) -> None:
        self._known: dict[str, KnownHost] = {}
        self._digests: dict[tuple[str, str], str] = {}  # key: name and revision of hosts

    def __len__(self) -> int:
        return len(self._known)

    def observe(self, heartbeat: Heartbeat, now: float) -> None:
        """Records the heartbeat of any process. Ignores an old one, and the last one of a process
        that stops.
        """
        load, known = heartbeat.host, self._known.get(heartbeat.process_id)
        is_new = known is None or known.is_before(heartbeat)
        if load is None or not is_new or heartbeat.state == "stopped":
            return
        self._known[heartbeat.process_id] = KnownHost(heartbeat, load, now)
        for each in load.models:
            if each.card is not None:
                self._digests[each.name, each.revision] = each.card.revision

    def model_of(self, hosted: HostedModel) -> ModelId:
        name, revision = hosted.name, hosted.revision
        return name, self._digests.get((name, revision), revision)

    def revision_of(self, host_id: str, model: ModelId) -> str:
        """Returns the model's revision as the host names it."""
        known = self._known.get(host_id)
        models = () if known is None else known.load.models
        found = (each.revision for each in models if self.model_of(each) == model)
        return next(found, model[1])

    def lost(self, host_id: str, now: float) -> None:
        if host_id in self._known:
            self._known[host_id].lost_at = now

    def live(self) -> list[KnownHost]:
        """Returns the hosts that carry out wakes."""
        known = self._known.values()
        return [each for each in known if each.lost_at is None and each.heartbeat.state == "ready"]

    def serving(self, queue: QueueKey, num_context_tokens: int) -> frozenset[str]:
        """Returns the hosts, also those that may come back, that can serve such a request."""
        known = self._known.values()
        return frozenset(
            each.host_id
            for each in known
            if not queue.regions or each.region in queue.regions
            if any(self._fits(hosted, queue, num_context_tokens) for hosted in each.load.models)
        )

    def failure(self, queue: QueueKey) -> str:
        """Returns why all hosts that have the queue's model have failed to load it, as the first of
        them says; else empty.
        """
        wanted = queue.model, queue.revision
        models = (model for each in self._known.values() for model in each.load.models)
        found = [each for each in models if self.model_of(each) == wanted]
        if any(each.state != "failed" for each in found):
            return ""
        return next((each.public_failure for each in found if each.public_failure), "")

    def forget_lost(self, now: float) -> None:
        for host_id, each in list(self._known.items()):
            if each.lost_at is not None and now - each.lost_at > HOST_RETURN_S:
                del self._known[host_id]
        if not self._known:
            self._digests.clear()

    def _fits(self, hosted: HostedModel, queue: QueueKey, num_context_tokens: int) -> bool:
        card = hosted.card
        if hosted.state == "failed" or self.model_of(hosted) != (queue.model, queue.revision):
            return False
        if card is None:  # never started there
            return True
        has_features = frozenset(queue.needs) <= frozenset(card.features)
        has_context = num_context_tokens <= card.max_context_tokens
        return card.block_size == queue.block_size and has_features and has_context

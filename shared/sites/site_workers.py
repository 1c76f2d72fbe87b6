"""What a site makes of the states of others: workers, one for each model of a gateway. No I/O.

What another site sends may change as often as it wants, or be a lie: memory and time are bounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from msgspec import structs

from shared.allowance import Allowance
from shared.lifecycle.health import SITE_INTERVAL_S
from shared.messages import Heartbeat, SiteCounters, SiteModels, SiteState, WorkerLoad
from shared.sites.site_states import ModelState, served_by, worker_at_site
from shared.subjects import site_in

STEP_BUDGET_S = 4 * SITE_INTERVAL_S
MAX_MODELS_PER_S = 4096  # of one site, in all states: those of four gateways with 1024 models
MAX_SITE_MODELS = 2048  # of all gateways of one site, which have one each at least
GONE_S = 10.0  # without a state
CHANGES_S = 60.0


@dataclass(slots=True)
class _HeardGateway:
    heard_at: float
    models: SiteModels
    counters: tuple[SiteCounters, ...] = ()  # in the models' order
    workers: dict[str, Heartbeat] = field(default_factory=dict)

    @property
    def num_places(self) -> int:
        """Returns its places among those of its site: a gateway without models takes one."""
        return max(1, len(self.models.models))

    def states(self, state: SiteState) -> Iterator[ModelState]:
        if len(state.counters) == len(state.loads):
            self.counters = state.counters
        counters = self.counters or (SiteCounters(),) * len(state.loads)
        return map(ModelState, self.models.models, state.loads, counters)


@dataclass(slots=True)
class _HeardSite:
    changes: Allowance
    gateways: dict[str, _HeardGateway] = field(default_factory=dict)

    def has_room(self, models: SiteModels, now: float) -> bool:
        """Forgets gateways that have gone if their places are needed."""
        others = {name: each for name, each in self.gateways.items() if name != models.gateway_id}
        num_wanted = max(1, len(models.models))
        num_free = MAX_SITE_MODELS - sum(each.num_places for each in others.values())
        if num_wanted <= num_free:
            return True
        gone = [name for name, each in others.items() if now - each.heard_at > GONE_S]
        num_free += sum(self.gateways.pop(each).num_places for each in gone)
        return num_wanted <= num_free


class SiteWorkers:
    """The workers that the states of the gateways of other sites stand for.

    A site has at most MAX_SITE_MODELS, of all its gateways: it takes no places from others. What is
    new, or has another card, costs much more than what stays: a site may change as many in
    CHANGES_S, and further ones are left out until then.
    """

    def __init__(self) -> None:
        self._sites: dict[str, _HeardSite] = {}

    def knows_models(self, state: SiteState) -> bool:
        """Whether the models of a state are known."""
        if not state.loads:
            return True
        known = self._gateway(state.gateway_id)
        if known is None or known.models.models_id != state.models_id:
            return False
        return len(known.models.models) == len(state.loads)

    def learn(self, models: SiteModels, now: float) -> bool:
        """Returns whether there is room for the models."""
        name = site_in(models.gateway_id) or ""
        site = self._sites.get(name)
        if site is None:
            site = self._sites[name] = _HeardSite(Allowance(MAX_SITE_MODELS, CHANGES_S, now))
        if not site.has_room(models, now):
            return False
        known = site.gateways.get(models.gateway_id)
        workers = {} if known is None else known.workers
        site.gateways[models.gateway_id] = _HeardGateway(now, models, workers=workers)
        return True

    def heartbeats(self, state: SiteState, now: float) -> list[Heartbeat]:
        """Returns the heartbeats of a state's workers, whose models are known. A worker whose model
        is gone has stopped. A state that a newer one has overtaken has none.
        """
        gateway = self._gateway(state.gateway_id)
        if gateway is None:
            return []
        of_epoch = [each for each in gateway.workers.values() if each.epoch == state.epoch]
        if any(each.sequence_number >= state.sequence_number for each in of_epoch):
            return []
        changes = self._sites[site_in(state.gateway_id) or ""].changes
        before, present = gateway.workers, dict[str, Heartbeat]()
        for each in gateway.states(state) if state.loads else ():
            beat = _heartbeat(state, each)
            known = before.get(beat.process_id)
            is_same = known is not None and known.model == beat.model
            if is_same or changes.takes(1, now):
                present[beat.process_id] = beat
        gateway.workers, gateway.heard_at = present, now
        if len(of_epoch) < len(before):
            before = {}  # another process: the fleet finds its workers restarted
        gone = [
            structs.replace(each, state="stopped", sequence_number=state.sequence_number)
            for worker_id, each in before.items()
            if worker_id not in present
        ]
        return [*present.values(), *gone]

    def _gateway(self, gateway_id: str) -> _HeardGateway | None:
        site = self._sites.get(site_in(gateway_id) or "")
        return None if site is None else site.gateways.get(gateway_id)


def _heartbeat(state: SiteState, of: ModelState) -> Heartbeat:
    card, role = of.model.card, of.model.role
    return Heartbeat(
        process_id=worker_at_site(state.gateway_id, *served_by(card), role),
        epoch=state.epoch,
        sequence_number=state.sequence_number,
        roles=(role,),
        state="draining" if state.is_draining else "ready",
        interval_s=SITE_INTERVAL_S,
        region=state.region,
        load=WorkerLoad(
            step=state.sequence_number,
            step_budget_s=STEP_BUDGET_S,
            **structs.asdict(of.load),
            **structs.asdict(of.counters),
        ),
        model=card,
    )

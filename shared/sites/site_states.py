"""A site as other sites see it: for each model one worker, which is a gateway of that site.

    there: heartbeats of its workers ──summed──▶ SiteState ──link──▶ here: heartbeats of a worker
                                     └──cards──▶ SiteModels, when a state names unknown ones

A site that computes prompts for others is a second worker, of the role prefill. So placement,
health and recovery treat a site as they treat a worker. No I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple

import msgspec
from msgspec import structs

from shared.lifecycle.health import SITE_INTERVAL_S, Fleet
from shared.messages import (
    Heartbeat,
    ModelCard,
    SiteCounters,
    SiteLoad,
    SiteModel,
    SiteModels,
    SiteState,
    WorkerLoad,
    WorkerRole,
)
from shared.subjects import SITE_SEPARATOR, is_at_site

STEP_BUDGET_S = 4 * SITE_INTERVAL_S
MAX_STATE_MODELS = 1024
MAX_MODELS_PER_S = 4096  # of one site, in all states: those of four gateways with 1024 models
MAX_SITE_GATEWAYS = 4096  # the last ones are remembered
COUNTERS_EVERY = 5  # states of one gateway: speeds change slowly, and counters are long
_DIGEST_BYTES = 6
_encode = msgspec.msgpack.Encoder().encode

Served = tuple[str, str, int]  # name, revision, block size: what one worker may stand for


class ModelState(NamedTuple):
    """What a site serves of one model in one role: load and counters are of the mean worker."""

    model: SiteModel
    load: SiteLoad
    counters: SiteCounters


def worker_at_site(
    gateway_id: str, card_name: str, revision: str, block_size: int, role: WorkerRole = "decode"
) -> str:
    """Returns the id of a site's gateway as the worker for one model."""
    text = f"{card_name}\0{revision}\0{block_size}"
    if role == "prefill":
        text += "\0prefill"
    digest = blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()
    return f"{gateway_id}{SITE_SEPARATOR}{digest}"


def site_models(fleet: Fleet, *, offers_prefill: bool = False) -> tuple[ModelState, ...]:
    """Returns the models that live decode workers of this site serve, always in the same order.
    With `offers_prefill` its prefill workers compute prompts for other sites, too.
    """
    cards: dict[Served, list[ModelCard]] = {}
    loads: dict[Served, list[WorkerLoad]] = {}
    for each in _workers(fleet, "decode"):
        if each.model is not None and each.load is not None:
            cards.setdefault(_served(each.model), []).append(each.model)
            loads.setdefault(_served(each.model), []).append(each.load)
    prefills: dict[Served, list[WorkerLoad]] = {}
    for each in _workers(fleet, "prefill"):
        if each.model is not None and each.load is not None and "decode" not in each.roles:
            prefills.setdefault(_served(each.model), []).append(each.load)
    queued = _queued_requests(fleet)
    num_gateways = max(1, sum(not is_at_site(each.process_id) for each in fleet.live("gateway")))
    offers = _prefill_offers(fleet) if offers_prefill else {}
    found: list[ModelState] = []
    for key in sorted(cards):
        load = _summed(
            loads[key],
            prefills.get(key, ()),
            num_queued=queued.get(key[0], 0),
            num_gateways=num_gateways,
        )
        counters = _counted([*loads[key], *prefills.get(key, ())])
        found.append(ModelState(SiteModel(_longest(cards[key])), load, counters))
        found += _prefill(offers.get(key, ()))
    return tuple(found)[:MAX_STATE_MODELS]


def models_id(models: Iterable[SiteModel]) -> bytes:
    """Returns a digest of the models of a state, in their order."""
    return blake2b(b"".join(map(_encode, models)), digest_size=_DIGEST_BYTES).digest()


def _prefill_offers(fleet: Fleet) -> dict[Served, list[Heartbeat]]:
    """Returns the prefill workers of this site that accept requests, by model."""
    offers: dict[Served, list[Heartbeat]] = {}
    for each in _workers(fleet, "prefill"):
        if each.model is not None and each.load is not None and each.state == "ready":
            offers.setdefault(_served(each.model), []).append(each)
    return offers


def _prefill(workers: Iterable[Heartbeat]) -> Iterator[ModelState]:
    """Yields what the workers of the most frequent card offer; nothing without workers."""
    by_card: dict[ModelCard, list[WorkerLoad]] = {}
    for each in workers:
        if each.model is not None and each.load is not None:
            by_card.setdefault(each.model, []).append(each.load)
    if by_card:
        card, loads = max(by_card.items(), key=lambda item: (len(item[1]), _encode(item[0])))
        load = _summed(loads, (), num_queued=0, num_gateways=1)
        yield ModelState(SiteModel(card, "prefill"), load, _counted(loads))


def _workers(fleet: Fleet, role: WorkerRole) -> Iterator[Heartbeat]:
    return (each for each in fleet.live(role) if not is_at_site(each.process_id))


def _served(card: ModelCard) -> Served:
    return card.name, card.revision, card.block_size


def _longest(cards: Iterable[ModelCard]) -> ModelCard:
    return max(cards, key=lambda card: (card.max_context_tokens, len(card.features), _encode(card)))


def _queued_requests(fleet: Fleet) -> dict[str, int]:
    """Returns the requests that wait at this site's schedulers, by model."""
    queued: dict[str, int] = {}
    for each in fleet.live("scheduler"):
        for demand in () if each.scheduler is None else each.scheduler.demands:
            queued[demand.model] = queued.get(demand.model, 0) + demand.num_queued_requests
    return queued


def _summed(
    decodes: Iterable[WorkerLoad],
    prefills: Iterable[WorkerLoad],
    *,
    num_queued: int,
    num_gateways: int,
) -> SiteLoad:
    """Sums loads. Free blocks are this gateway's share, and none while requests wait. Requests and
    tokens are those of the mean worker: of those that decode, and of those that compute prompts.
    """
    decodes, prefills = list(decodes), list(prefills)
    every, num_computing = [*decodes, *prefills], len(prefills or decodes)
    num_waiting = num_queued + sum(each.num_waiting for each in decodes)
    free = 0 if num_queued else sum(each.num_free_blocks for each in decodes) // num_gateways
    return SiteLoad(
        num_running=sum(each.num_running for each in decodes) // len(decodes),
        num_waiting=-(-num_waiting // len(decodes)),
        num_free_blocks=free,
        num_total_blocks=max(each.num_total_blocks for each in decodes),
        prefill_tokens_in_flight=sum(each.prefill_tokens_in_flight for each in every)
        // num_computing,
        decode_tokens_in_flight=sum(each.decode_tokens_in_flight for each in decodes)
        // len(decodes),
        num_engines=num_computing,
    )


def _counted(every: Sequence[WorkerLoad]) -> SiteCounters:
    """Returns the counters of the mean worker: their sum would grow by more than a worker's can."""
    return SiteCounters(
        num_generated_tokens=sum(each.num_generated_tokens for each in every) // len(every),
        num_computed_prompt_tokens=sum(each.num_computed_prompt_tokens for each in every)
        // len(every),
        num_busy_steps=sum(each.num_busy_steps for each in every) // len(every),
        busy_s=sum(each.busy_s for each in every) / len(every),
    )


class StateBudget:
    """Limits the states that one site may send: each model in them takes time of this process."""

    def __init__(self, now: float) -> None:
        self.num_refused = 0  # since the last accepted one
        self._left: float = MAX_MODELS_PER_S
        self._at = now

    def takes(self, state: SiteState, now: float) -> bool:
        earned = (now - self._at) * MAX_MODELS_PER_S
        self._left, self._at = min(self._left + earned, MAX_MODELS_PER_S), now
        cost = 1 + len(state.loads)
        if cost > self._left:
            self.num_refused += 1
            return False
        self._left -= cost
        self.num_refused = 0
        return True


class SiteWorkers:
    """The workers that the states of one gateway of another site stand for."""

    def __init__(self) -> None:
        self._models: dict[str, SiteModels] = {}  # by gateway
        self._counters: dict[str, tuple[SiteCounters, ...]] = {}  # likewise, in the models' order
        self._last: dict[str, dict[str, Heartbeat]] = {}  # by gateway, then by worker

    def knows_models(self, state: SiteState) -> bool:
        """Whether the models of a state are known."""
        if not state.loads:
            return True
        known = self._models.get(state.gateway_id)
        if known is None or known.models_id != state.models_id:
            return False
        return len(known.models) == len(state.loads)

    def learn(self, models: SiteModels) -> None:
        self._models.pop(models.gateway_id, None)
        self._models[models.gateway_id] = models
        self._counters.pop(models.gateway_id, None)
        if len(self._models) > MAX_SITE_GATEWAYS:
            forgotten = next(iter(self._models))
            del self._models[forgotten]
            self._counters.pop(forgotten, None)

    def heartbeats(self, state: SiteState) -> list[Heartbeat]:
        """Returns the heartbeats of a state's workers, whose models are known. A worker whose model
        is gone has stopped. A state that a newer one has overtaken has none.
        """
        now = {each.process_id: each for each in self._heartbeats(state)}
        before = self._last.get(state.gateway_id, {})
        if any(each.epoch != state.epoch for each in before.values()):
            before = {}  # another process: the fleet finds its workers restarted
        if any(each.sequence_number >= state.sequence_number for each in before.values()):
            return []
        gone = [
            structs.replace(each, state="stopped", sequence_number=state.sequence_number)
            for worker_id, each in before.items()
            if worker_id not in now
        ]
        self._last.pop(state.gateway_id, None)
        if now:
            self._last[state.gateway_id] = now
        if len(self._last) > MAX_SITE_GATEWAYS:
            del self._last[next(iter(self._last))]
        return [*now.values(), *gone]

    def _heartbeats(self, state: SiteState) -> Iterator[Heartbeat]:
        if not state.loads:
            return
        if len(state.counters) == len(state.loads):
            self._counters[state.gateway_id] = state.counters
        unknown = (SiteCounters(),) * len(state.loads)
        counters = self._counters.get(state.gateway_id, unknown)
        models = self._models[state.gateway_id].models
        for each in map(ModelState, models, state.loads, counters):
            yield _heartbeat(state, each)


def _heartbeat(state: SiteState, of: ModelState) -> Heartbeat:
    card, role = of.model.card, of.model.role
    return Heartbeat(
        process_id=worker_at_site(state.gateway_id, *_served(card), role),
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

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

from shared.lifecycle.health import Fleet
from shared.messages import (
    Heartbeat,
    ModelCard,
    SiteCounters,
    SiteLoad,
    SiteModel,
    WorkerLoad,
    WorkerRole,
)
from shared.pixels.pixel_frames import IMAGES_FEATURE
from shared.subjects import SITE_SEPARATOR, is_at_site, site_in
from shared.telemetry.log_text import printable

MAX_STATE_MODELS = 1024
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
            cards.setdefault(served_by(each.model), []).append(each.model)
            loads.setdefault(served_by(each.model), []).append(each.load)
    prefills: dict[Served, list[WorkerLoad]] = {}
    for each in _workers(fleet, "prefill"):
        if each.model is not None and each.load is not None and "decode" not in each.roles:
            prefills.setdefault(served_by(each.model), []).append(each.load)
    queued = _queues(fleet)
    gateways = num_gateways(fleet)
    offers = _prefill_offers(fleet) if offers_prefill else {}
    found: list[ModelState] = []
    for key in sorted(cards):
        load = _summed(
            loads[key],
            prefills.get(key, ()),
            queue=queued.get(key[0], NO_QUEUE),
            num_gateways=gateways,
        )
        counters = _counted([*loads[key], *prefills.get(key, ())])
        card = _without_images(_longest(cards[key]))
        found.append(ModelState(SiteModel(card), load, counters))
        found += _prefill(offers.get(key, ()))
    return tuple(found)[:MAX_STATE_MODELS]


def num_gateways(fleet: Fleet) -> int:
    """Returns the live gateways of the site of the gateway that has this fleet, itself included."""
    own = fleet.own_process_id
    return 1 + sum(each.process_id != own for each in fleet.live("gateway"))


def models_id(models: Iterable[SiteModel]) -> bytes:
    """Returns a digest of the models of a state, in their order."""
    return blake2b(b"".join(map(_encode, models)), digest_size=_DIGEST_BYTES).digest()


def _prefill_offers(fleet: Fleet) -> dict[Served, list[Heartbeat]]:
    """Returns the prefill workers of this site that accept requests, by model."""
    offers: dict[Served, list[Heartbeat]] = {}
    for each in _workers(fleet, "prefill"):
        if each.model is not None and each.load is not None and each.state == "ready":
            offers.setdefault(served_by(each.model), []).append(each)
    return offers


def _prefill(workers: Iterable[Heartbeat]) -> Iterator[ModelState]:
    """Yields what the workers of the most frequent card offer; nothing without workers."""
    by_card: dict[ModelCard, list[WorkerLoad]] = {}
    for each in workers:
        if each.model is not None and each.load is not None:
            by_card.setdefault(each.model, []).append(each.load)
    if by_card:
        card, loads = max(by_card.items(), key=lambda item: (len(item[1]), _encode(item[0])))
        load = _summed(loads, (), queue=NO_QUEUE, num_gateways=1)
        yield ModelState(SiteModel(_without_images(card), "prefill"), load, _counted(loads))


def models_of_sites(fleet: Fleet) -> dict[str, list[str]]:
    """Returns the models that live gateways of other sites serve, by site."""
    found: dict[str, set[str]] = {}
    for each in fleet.live("decode"):
        site = site_in(each.process_id)
        if site is not None and each.model is not None:
            found.setdefault(site, set()).add(printable(each.model.name))
    return {site: sorted(names) for site, names in found.items()}


def _workers(fleet: Fleet, role: WorkerRole) -> Iterator[Heartbeat]:
    return (each for each in fleet.live(role) if not is_at_site(each.process_id))


def served_by(card: ModelCard) -> Served:
    return card.name, card.revision, card.block_size


def _longest(cards: Iterable[ModelCard]) -> ModelCard:
    return max(cards, key=lambda card: (card.max_context_tokens, len(card.features), _encode(card)))


def _without_images(card: ModelCard) -> ModelCard:
    """Returns the card as other sites see it: pixels do not cross links."""
    features = tuple(each for each in card.features if each != IMAGES_FEATURE)
    return card if features == card.features else structs.replace(card, features=features)


class _Queue(NamedTuple):
    """What waits at a site's schedulers for one model."""

    num_requests: int = 0
    num_tokens: int = 0  # of their prompts
    waits_for_blocks: bool = False  # and not for the time of workers that compute prompts


NO_QUEUE = _Queue()


def _queues(fleet: Fleet) -> dict[str, _Queue]:
    """Returns what waits at this site's schedulers, by model."""
    found: dict[str, _Queue] = {}
    for each in fleet.live("scheduler"):
        for demand in () if each.scheduler is None else each.scheduler.demands:
            before, num = found.get(demand.model, NO_QUEUE), demand.num_queued_requests
            found[demand.model] = _Queue(
                before.num_requests + num,
                before.num_tokens + demand.num_queued_tokens,
                before.waits_for_blocks or (num > 0 and demand.role == "decode"),
            )
    return found


def _summed(
    decodes: Iterable[WorkerLoad],
    prefills: Iterable[WorkerLoad],
    *,
    queue: _Queue,
    num_gateways: int,
) -> SiteLoad:
    """Sums loads. Free blocks are this gateway's share, and none while requests wait for blocks;
    those that wait for time are work ahead, which ends before the next state may come. Requests and
    tokens are those of the mean worker: of those that decode, and of those that compute prompts.
    """
    decodes, prefills = list(decodes), list(prefills)
    every, num_computing = [*decodes, *prefills], len(prefills or decodes)
    num_waiting = queue.num_requests + sum(each.num_waiting for each in decodes)
    num_free = 0 if queue.waits_for_blocks else sum(each.num_free_blocks for each in decodes)
    num_tokens = queue.num_tokens + sum(each.prefill_tokens_in_flight for each in every)
    return SiteLoad(
        num_running=sum(each.num_running for each in decodes) // len(decodes),
        num_waiting=-(-num_waiting // len(decodes)),
        num_free_blocks=num_free // num_gateways,
        num_total_blocks=max(each.num_total_blocks for each in decodes),
        prefill_tokens_in_flight=num_tokens // num_computing,
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

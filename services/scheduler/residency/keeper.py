"""Keeps models hot that are in demand: asks hosts to wake and park them, as a policy decides.

A request that no ready worker serves, but some host can, waits here until a worker does, until its
deadline, or until it is known that the wake ends too late. Several schedulers may ask for the same:
hosts carry out each wake once, and one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import replace
from functools import partial
from math import inf

import structlog

from services.scheduler.backlog import QueuedRequest
from services.scheduler.request_queues import num_context_tokens
from services.scheduler.residency.arrival_rates import ArrivalRates
from services.scheduler.residency.devices import NumRunning, devices_of
from services.scheduler.residency.hosts import Hosts
from services.scheduler.residency.view import (
    Action,
    Device,
    ModelDemand,
    ModelId,
    Park,
    Policy,
    Wake,
)
from services.scheduler.residency.wake_orders import Key, Orders
from shared import subjects
from shared.clock import Clock
from shared.errors import DependencyUnavailable, HearthError, NoCapacity
from shared.messages import Done, Failure, Heartbeat, ModelWaking, ParkModel, WakeModel
from shared.transport.timed_requests import TimedRequests

log = structlog.get_logger(__name__)

WAKE_REPLY_S = 1.0  # plus the round trip
PARK_REPLY_S = 30.0  # the model's running requests end first
WANTED_S = 2.0  # a rejected request that must not wait counts as waiting for so long
RETRY_AFTER_S = 2.0

Place = tuple[str, str]  # host, device
Start = Callable[[Coroutine[object, object, None], Callable[[Exception], None]], object]


class ResidencyKeeper:
    def __init__(
        self,
        requests: TimedRequests,
        policy: Policy,
        clock: Clock,
        *,
        num_running: NumRunning,
        start: Start,
    ) -> None:
        """Carries out the policy. `num_running` counts the requests of a worker that accepts
        requests, and is None for others. `start` starts a task, and calls back if it raises.
        """
        self._requests, self._policy, self._clock = requests, policy, clock
        self._num_running, self._start = num_running, start
        self._hosts, self._orders, self._rates = Hosts(), Orders(), ArrivalRates()
        self._acting: dict[Place, list[Action]] = {}  # actions that hosts have not replied to yet
        self._wanted: dict[ModelId, float] = {}  # end of the demand of requests that must not wait

    # ── hosts and requests ───────────────────────────────────────────────────────────────────────

    def on_heartbeat(self, heartbeat: Heartbeat) -> None:
        self._hosts.observe(heartbeat, self._clock.now())

    def lost(self, process_id: str) -> None:
        self._hosts.lost(process_id, self._clock.now())
        self._orders.lost(process_id)
        self._acting = {
            place: each for place, each in self._acting.items() if place[0] != process_id
        }

    def arrived(self, ticket: QueuedRequest) -> None:
        if len(self._hosts):
            self._rates.record(model_of(ticket), self._clock.now())

    def can_serve(self, ticket: QueuedRequest) -> bool:
        """Whether a host can make the ticket's model hot for it."""
        return bool(len(self._hosts) and self._serving(ticket))

    def rejection(self, ticket: QueuedRequest, now: float) -> NoCapacity:
        """Returns the error of a ticket that must not wait; its model is woken for later ones."""
        self._wanted[model_of(ticket)] = now + WANTED_S
        wait_s = self._orders.ready_at(model_of(ticket)) - now
        return _not_hot(ticket, wait_s if 0 < wait_s < WANTED_S else RETRY_AFTER_S)

    def error(self, ticket: QueuedRequest, now: float) -> NoCapacity | None:
        """Returns the error of a waiting ticket that cannot be served before its deadline, if that
        is known.
        """
        model = model_of(ticket)
        ready_at = self._orders.ready_at(model)
        if ready_at > ticket.deadline_at and ready_at < inf:
            return _not_hot(ticket, ready_at - now)
        refusal = self._orders.refusal(model, self._serving(ticket))
        if refusal is None or (refusal.has_time and refusal.until < ticket.deadline_at):
            return None
        retry_after_s = refusal.until - now if refusal.has_time else RETRY_AFTER_S
        return NoCapacity(refusal.message, retry_after_s=retry_after_s)

    def failure(self, ticket: QueuedRequest) -> NoCapacity | None:
        """Returns the error of a ticket whose model no host could load."""
        failure = self._hosts.failure(ticket.queue)
        if not failure:
            return None
        message = f"the model {ticket.queue.model!r} cannot be served: {failure}"
        return NoCapacity(message, retry_after_s=RETRY_AFTER_S)

    def _serving(self, ticket: QueuedRequest) -> frozenset[str]:
        return self._hosts.serving(ticket.queue, num_context_tokens(ticket.request))

    # ── deciding ─────────────────────────────────────────────────────────────────────────────────

    def decide(
        self, held: Iterable[QueuedRequest], unserved: Iterable[QueuedRequest], now: float
    ) -> None:
        """Sends the policy's wakes and parks to hosts. `held` are all requests that are not placed;
        `unserved` are those that no worker serves.
        """
        if not len(self._hosts):
            return
        self._orders.expire(now)
        self._hosts.forget_lost(now)
        demands = self._demands(held, unserved, now)
        if not any(each.num_queued for each in demands.values()):
            return
        devices = devices_of(
            self._hosts.live(),
            self._orders,
            model_of=self._hosts.model_of,
            num_running=self._num_running,
            now=now,
        )
        devices = [self._with_acting(each) for each in devices]
        place_of = {
            (each.host_id, model): (each.host_id, each.name)
            for each in devices
            for model in each.models
        }
        by_place: dict[Place, list[Action]] = {}
        for action in self._policy.decide(devices, demands, now):
            by_place.setdefault(place_of[_key(action)], []).append(action)
        expected = {
            (each.host_id, model): resident.ready_in_s
            for each in devices
            for model, resident in each.models.items()
        }
        for place, actions in by_place.items():
            self._acting[place] = actions
            self._plan(actions, expected, now)
            fail = partial(self._give_up, place, actions)
            self._start(self._act(place, actions, expected), fail)

    def _with_acting(self, device: Device) -> Device:
        is_acting = (device.host_id, device.name) in self._acting
        return replace(device, is_waking=True) if is_acting else device

    def _demands(
        self, held: Iterable[QueuedRequest], unserved: Iterable[QueuedRequest], now: float
    ) -> dict[ModelId, ModelDemand]:
        demands = {
            model: ModelDemand(
                rate=self._rates.rate(model, now), last_used_at=self._rates.last_used_at(model)
            )
            for model in self._rates.models()
        }
        for ticket in held:
            demand = demands.get(model_of(ticket), ModelDemand())
            demands[model_of(ticket)] = _with_ticket(demand, ticket)
        for ticket in unserved:
            demand = demands.get(model_of(ticket), ModelDemand())
            if demand.hosts is None and not ticket.is_removed:
                demands[model_of(ticket)] = replace(demand, hosts=self._serving(ticket))
        self._wanted = {model: until for model, until in self._wanted.items() if now < until}
        for model, until in self._wanted.items():
            demand = demands.get(model, ModelDemand())
            if not demand.num_queued:
                demands[model] = replace(demand, num_queued=1, oldest_at=until - WANTED_S)
        return demands

    def _plan(self, actions: list[Action], expected: Mapping[Key, float], now: float) -> None:
        for action in actions:
            if isinstance(action, Park):
                self._orders.park_asked(_key(action), PARK_REPLY_S, now)
            else:
                park_s = PARK_REPLY_S * (len(actions) - 1)
                self._orders.wake_planned(_key(action), expected[_key(action)], park_s, now)

    # ── acting ───────────────────────────────────────────────────────────────────────────────────

    async def _act(
        self, place: Place, actions: list[Action], expected: Mapping[Key, float]
    ) -> None:
        """Parks models, then wakes others, but not without the memory that each park frees."""
        for action in actions:
            if self._acting.get(place) is not actions:  # the host was lost
                return
            if isinstance(action, Wake):
                await self._wake(action, expected[_key(action)])
            elif not await self._park(action):
                self._drop(place, actions)
        if self._acting.get(place) is actions:
            del self._acting[place]

    def _give_up(self, place: Place, actions: list[Action], error: Exception) -> None:
        self._drop(place, actions)
        for action in actions:
            if isinstance(action, Park):
                self._orders.park_ended(_key(action), self._clock.now(), is_parked=False)

    def _drop(self, place: Place, actions: list[Action]) -> None:
        if self._acting.get(place) is actions:
            del self._acting[place]
            for action in actions:
                if isinstance(action, Wake):
                    self._orders.wake_dropped(_key(action))

    async def _park(self, action: Park) -> bool:
        revision = self._hosts.revision_of(*_key(action))
        message = ParkModel(model=action.model, revision=revision)
        subject = subjects.host_models(action.host_id)
        is_parked = False
        try:
            await self._requests.request(
                action.host_id, subject, message, Done, base_s=PARK_REPLY_S
            )
            is_parked = True
        except HearthError as error:
            log.info("park_failed", host=action.host_id, model=action.model, reason=error.code)
        self._orders.park_ended(_key(action), self._clock.now(), is_parked=is_parked)
        return is_parked

    async def _wake(self, action: Wake, expected_s: float) -> None:
        key = _key(action)
        revision = self._hosts.revision_of(*key)
        message = WakeModel(model=action.model, revision=revision)
        self._orders.wake_asked(key, expected_s, self._clock.now())
        try:
            reply = await self._requests.request(
                action.host_id,
                subjects.host_models(action.host_id),
                message,
                ModelWaking,
                base_s=WAKE_REPLY_S,
                on_late=lambda reply: self._late(key, reply),
            )
            self._orders.accepted(key, reply.ready_in_s, self._clock.now())
        except DependencyUnavailable:
            self._orders.no_reply(key, self._clock.now())
        except HearthError as error:
            log.info("wake_refused", host=action.host_id, model=action.model, reason=error.code)
            now = self._clock.now()
            self._orders.refused(key, error.message, error.retry_after_s, now)

    def _late(self, key: Key, reply: ModelWaking | Failure | None) -> None:
        if isinstance(reply, ModelWaking):
            self._orders.accepted(key, reply.ready_in_s, self._clock.now())


def model_of(ticket: QueuedRequest) -> ModelId:
    return ticket.queue.model, ticket.queue.revision


def _key(action: Action) -> Key:
    return action.host_id, (action.model, action.revision)


def _with_ticket(demand: ModelDemand, ticket: QueuedRequest) -> ModelDemand:
    return replace(
        demand,
        num_queued=demand.num_queued + 1,
        num_tokens=demand.num_tokens + ticket.num_tokens,
        oldest_at=min(demand.oldest_at, ticket.queued_at),
        deadline_at=min(demand.deadline_at, ticket.deadline_at),
    )


def _not_hot(ticket: QueuedRequest, wait_s: float) -> NoCapacity:
    message = f"{ticket.queue.model!r} is not in memory; it is expected in {wait_s:.1f} s"
    return NoCapacity(message, retry_after_s=wait_s)

"""NATS in memory: real msgpack, subjects with wildcards, queue groups, replies, and faults.

NATS's guarantee is preserved: messages of one sender reach one subscription in the order of
sending. All else may differ from run to run: the order across senders, across the subscriptions of
one receiver, and of replies. `fate` decides each delivery: core NATS is at most once, so any
message can be lost, and a client that reconnects resends unconfirmed messages, so any message can
be delivered a second time, later.

A process without its connection (cut off, server down, or frozen until the server drops it) buffers
its publications and sends them after it reconnects, like nats-py; messages that are published for
it meanwhile are lost.
"""

from __future__ import annotations

import asyncio
from asyncio import TimerHandle
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, cached_property, lru_cache, partial
from random import Random
from typing import Any, TypeVar

import msgspec
import structlog

from shared.errors import (
    DependencyUnavailable,
    NoResponders,
    PayloadTooLarge,
    RequestTimeout,
    SenderMismatch,
)
from shared.messages import Failure, Message
from shared.regions.region_check import RegionCheck
from shared.subjects import sender_of, sent_by
from shared.transport.bus import Unsubscribe, error_of, hand_over, late_reply, reply_to
from shared.transport.nats_client import LATE_REPLY_S
from shared.transport.rejected_messages import RejectedMessages
from shared.transport.sender_check import SenderCheck
from shared.transport.site_bytes import RefusedSites, SiteBytes
from shared.transport.wire_errors import UNREADABLE
from tests.support.world.process import SimulatedProcess

log = structlog.get_logger(__name__)

M = TypeVar("M", bound=Message)
Reply = Callable[["_Connection", bytes], None]  # responder, payload
Decode = Callable[[bytes], Any]

INBOX = "_INBOX"
GIVEN_UP_AFTER_S = 3.0  # two missed pings, one per second
_encode = msgspec.msgpack.Encoder().encode


@lru_cache(maxsize=10_000)  # few distinct arguments, repeated at each change of a subscription
def matches(pattern: str, subject: str) -> bool:
    """Whether a subject matches: `*` stands for one token, a final `>` for one or more."""
    wanted, given = pattern.split("."), subject.split(".")
    if wanted[-1] == ">" and len(given) >= len(wanted):
        wanted, given = wanted[:-1], given[: len(wanted) - 1]
    return len(wanted) == len(given) and all(
        want in ("*", token) for want, token in zip(wanted, given, strict=True)
    )


class Parcel:
    """An encoded message in flight; all receivers of the same type share one decoded copy."""

    __slots__ = ("_decoded", "_decoder", "data", "reply", "wire_subject")

    def __init__(self, data: bytes, reply: Reply, wire_subject: str) -> None:
        self.data = data
        self.wire_subject = wire_subject
        self.reply = reply
        self._decoder: object = None
        self._decoded: Any = None

    def __len__(self) -> int:
        return len(self.data)

    def decoded(self, message_type: Any, decode: Decode) -> Any:
        if self._decoder is not message_type:
            self._decoded, self._decoder = decode(self.data), message_type
        return self._decoded


@dataclass(eq=False)
class _Connection:
    """The connection of one bus to the server."""

    process: SimulatedProcess
    is_up: bool = True
    num_reconnects: int = 0
    unsent: deque[Callable[[], object]] = field(default_factory=deque)
    subscriptions: list[_Subscription] = field(default_factory=list)
    give_up: TimerHandle | None = None


@dataclass(eq=False)
class _Subscription:
    connection: _Connection
    pattern: str
    queue: str
    deliver: Callable[[Parcel], None]
    is_open: bool = True
    last_arrival: dict[str, float] = field(default_factory=dict)  # key: sender

    @property
    def process(self) -> SimulatedProcess:
        return self.connection.process

    def take(self, parcel: Parcel) -> None:
        if self.is_open and self.connection.is_up:
            self.connection.process.arrive(self._deliver, parcel)

    def _deliver(self, parcel: Parcel) -> None:
        if self.is_open:
            self.deliver(parcel)


# (sender, None: at another site; subject; data; receivers). A reply has `_INBOX.` and its subject.
DeliveryTap = Callable[[SimulatedProcess | None, str, bytes, list[SimulatedProcess]], None]
# (subject, sender, receiver) -> delays of the copies that arrive; empty: the message is lost
Fate = Callable[[str, str, str], tuple[float, ...]]


class SimulatedNetwork:
    def __init__(
        self, *, seed: int = 0, latency_s: float = 0.0002, max_payload_bytes: int = 8 * 1024 * 1024
    ) -> None:
        self.latency_s = latency_s
        self.max_payload_bytes = max_payload_bytes
        self.is_dropped: Callable[[str, str, str], bool] | None = None
        self.spoil_reply: Callable[[bytes], bytes] = lambda data: data
        self.fate: Fate | None = None
        self.jitter_s = 0.0  # maximum additional delay of a message
        # (sender, receiver) -> additional one-way delay; None: all are equally near
        self.distance_s: Callable[[str, str], float] | None = None
        self.is_down = False  # every message is lost, but no process is disconnected
        self.is_away = False  # the server is down: see `stop_server`
        self.is_hanging = False
        self.beyond: Callable[[Parcel], int] | None = None  # to linked sites; returns receivers
        self.log: list[tuple[float, str, str]] = []  # (sent at, sender, subject)
        self.taps: list[Callable[[str, str, bytes], None]] = []  # (sender, subject, data)
        self.delivery_taps: list[DeliveryTap] = []
        self._random = Random(seed)
        self._subscriptions: list[_Subscription] = []
        self._interest: dict[str, tuple[list[_Subscription], list[list[_Subscription]]]] = {}
        self._connections: dict[str, _Connection] = {}
        self._by_process: dict[SimulatedProcess, _Connection] = {}
        self._doubled: list[_Connection] = []  # connections whose id a second process has taken
        self._processes: dict[str, SimulatedProcess] = {}
        self._held: list[Callable[[], object]] = []  # deliveries that a hanging server holds back

    def bus(
        self,
        process_id: str,
        process: SimulatedProcess | None = None,
        regions: RegionCheck | None = None,
    ) -> SimulatedBus:
        owner = self._process(process_id) if process is None else process
        self._processes[process_id] = owner
        former = self._connections.get(process_id)
        if former is not None and former.process is not owner and not former.process.is_dead:
            self._doubled.append(former)
        connection = self._connections[process_id] = self._by_process[owner] = _Connection(owner)
        return SimulatedBus(self, process_id, connection, regions)

    @cached_property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Cached for the network's lifetime: asyncio's lookup costs a system call each time."""
        return asyncio.get_running_loop()

    # ── faults ───────────────────────────────────────────────────────────────────────────────────

    def freeze(self, process_id: str) -> None:
        self.freeze_process(self._process(process_id))

    def freeze_process(self, process: SimulatedProcess) -> None:
        process.freeze()
        connection = self._by_process.get(process)
        if connection is not None:
            loop = asyncio.get_running_loop()
            connection.give_up = loop.call_later(
                GIVEN_UP_AFTER_S, self._disconnect_while_frozen, connection
            )

    def thaw(self, process_id: str, *, backlog_after_s: float | None = None) -> None:
        self.thaw_process(self._process(process_id), backlog_after_s=backlog_after_s)

    def thaw_process(
        self, process: SimulatedProcess, *, backlog_after_s: float | None = None
    ) -> None:
        connection = self._by_process.get(process)
        if connection is not None and connection.give_up is not None:
            connection.give_up.cancel()
            connection.give_up = None
        process.thaw(backlog_after_s=backlog_after_s)
        if connection is not None and not connection.is_up:
            self._reconnect_later(connection)

    def disconnect(self, process_id: str) -> None:
        """Removes a dead process's subscriptions, like the server does."""
        self.remove_all(self._process(process_id))

    def remove_all(self, process: SimulatedProcess) -> None:
        for each in [s for s in self._subscriptions if s.process is process]:
            self.remove(each)

    def cut_off(self, process: SimulatedProcess) -> None:
        """Drops the process's connection, and messages in flight to it."""
        self._lose(self._by_process[process])

    def reconnect_later(self, process: SimulatedProcess) -> None:
        self._reconnect_later(self._by_process[process])

    def _reconnect_later(self, connection: _Connection) -> None:
        loop = asyncio.get_running_loop()
        delay_s = self._random.uniform(0.1, 0.3)
        loop.call_later(delay_s, self._reconnect, connection)

    def stop_server(self) -> None:
        self.is_away = True
        self._held.clear()
        for connection in self._all():
            self._lose(connection)

    def start_server(self) -> None:
        self.is_away = False
        for connection in self._all():
            self._reconnect_later(connection)

    def _all(self) -> list[_Connection]:
        return [*self._connections.values(), *self._doubled]

    def hang(self) -> None:
        self.is_hanging = True

    def resume(self) -> None:
        """Delivers the held messages to processes whose connections still exist."""
        self.is_hanging = False
        held, self._held = self._held, []
        for action in held:
            action()
        for connection in self._all():
            if not connection.is_up:
                self._reconnect_later(connection)

    def _lose(self, connection: _Connection) -> None:
        connection.is_up = False
        self._interest.clear()

    def _disconnect_while_frozen(self, connection: _Connection) -> None:
        connection.give_up = None
        self._lose(connection)

    def _reconnect(self, connection: _Connection) -> None:
        process = connection.process
        if connection.is_up or process.is_dead or self.is_away or self.is_hanging:
            return
        if process.is_frozen:  # it retries once it is awake
            process.arrive(partial(self._reconnect_later, connection))
            return
        connection.is_up = True
        connection.num_reconnects += 1
        self._interest.clear()
        while connection.unsent:
            connection.unsent.popleft()()

    # ── message delivery ─────────────────────────────────────────────────────────────────────────

    def add(self, subscription: _Subscription) -> None:
        self._subscriptions.append(subscription)
        self._interest.clear()

    def remove(self, subscription: _Subscription) -> None:
        if subscription.is_open:
            subscription.is_open = False
            self._subscriptions.remove(subscription)
            self._interest.clear()

    def post(self, connection: _Connection, subject: str, parcel: Parcel) -> None:
        """Publishes a message."""
        self._when_connected(connection, lambda: self._route(connection, subject, parcel))

    def send_request(
        self,
        connection: _Connection,
        subject: str,
        parcel: Parcel,
        on_no_responders: Callable[[], object],
    ) -> None:
        def send() -> None:
            if self._route(connection, subject, parcel) == 0:
                self._after_a_while(
                    connection.process.process_id, connection.process, on_no_responders
                )

        self._when_connected(connection, send)

    def answer(
        self, responder: _Connection, requester: _Connection, settle: Callable[[], object]
    ) -> None:
        """Delivers a reply: the requester must be connected, and awake to receive it."""

        def send() -> None:
            if not self.is_down:
                self._after_a_while(responder.process.process_id, requester.process, settle)

        self._when_connected(responder, send)

    def _when_connected(self, connection: _Connection, send: Callable[[], object]) -> None:
        if connection.process.is_dead:
            return
        if connection.process.is_frozen:  # only tests that act for a frozen process reach this
            connection.process.arrive(partial(self._when_connected, connection, send))
        elif not connection.is_up:
            connection.unsent.append(send)
        elif self.is_hanging:
            self._held.append(send)
        else:
            send()

    def _route(self, connection: _Connection, subject: str, parcel: Parcel) -> int:
        """Returns the number of receiving subscriptions (all without a queue, one per group)."""
        loop, sender = self.loop, connection.process.process_id
        self.log.append((loop.time(), sender, subject))
        for tap in self.taps:
            tap(sender, subject, parcel.data)
        if self.is_down:
            return 1  # a missing receiver cannot be detected
        num_beyond = 0 if self.beyond is None else self.beyond(parcel)
        return num_beyond + self._deliver(sender, subject, parcel, connection.process)

    def receive(self, wire_subject: str, parcel: Parcel) -> None:
        """Delivers what came over a link."""
        if self.is_hanging:
            self._held.append(partial(self.receive, wire_subject, parcel))
        elif not self.is_down:
            self._deliver(sender_of(wire_subject), wire_subject.rsplit(".", 2)[0], parcel)

    def num_receivers(self, subject: str) -> int:
        plain, groups = self._interested(subject)
        return len(plain) + len(groups)

    def _deliver(
        self, sender: str, subject: str, parcel: Parcel, origin: SimulatedProcess | None = None
    ) -> int:
        loop = self.loop
        plain, groups = self._interested(subject)
        receivers = plain + [self._random.choice(members) for members in groups]
        for tap in self.delivery_taps:
            tap(origin, subject, parcel.data, [each.process for each in receivers])
        usual = loop.time() + self._latency()
        together: list[_Subscription] = []
        for each in receivers:
            if self.is_dropped and self.is_dropped(subject, sender, each.process.process_id):
                continue
            if self.fate is not None:
                self._deliver_as_fated(each, subject, sender, parcel)
            elif self.distance_s is not None:
                self._deliver_in_order(usual, each, sender, parcel)
            elif each.last_arrival.get(sender, 0.0) > usual:
                self._deliver_at(each.last_arrival[sender], each, parcel)
            else:
                each.last_arrival[sender] = usual
                together.append(each)
        if together:
            loop.call_at(usual, _take_all, together, parcel)
        return len(receivers)

    def _deliver_as_fated(
        self, subscription: _Subscription, subject: str, sender: str, parcel: Parcel
    ) -> None:
        assert self.fate is not None
        now = self.loop.time()
        delays = self.fate(subject, sender, subscription.process.process_id)
        for number, delay_s in enumerate(delays):
            when = now + self._latency() + delay_s
            if number == 0:
                self._deliver_in_order(when, subscription, sender, parcel)
            else:
                when += self._distance_s(sender, subscription.process.process_id)
                self._deliver_at(when, subscription, parcel)

    def _deliver_in_order(
        self, when: float, subscription: _Subscription, sender: str, parcel: Parcel
    ) -> None:
        when += self._distance_s(sender, subscription.process.process_id)
        when = max(when, subscription.last_arrival.get(sender, 0.0))
        subscription.last_arrival[sender] = when
        self._deliver_at(when, subscription, parcel)

    def _deliver_at(self, when: float, subscription: _Subscription, parcel: Parcel) -> None:
        self.loop.call_at(when, subscription.take, parcel)

    def _after_a_while(
        self, sender: str, receiver: SimulatedProcess, action: Callable[[], object]
    ) -> None:
        delays: tuple[float, ...] = (0.0,)
        if self.fate is not None:
            delays = self.fate(INBOX, sender, receiver.process_id)
        loop, connection = self.loop, self._by_process[receiver]

        def take() -> None:
            if connection.is_up and connection.process is receiver:
                receiver.arrive(action)

        distance_s = self._distance_s(sender, receiver.process_id)
        for delay_s in delays:
            loop.call_later(self._latency() + distance_s + delay_s, take)

    def _distance_s(self, sender: str, receiver: str) -> float:
        return 0.0 if self.distance_s is None else self.distance_s(sender, receiver)

    def _latency(self) -> float:
        if self.jitter_s:
            return self.latency_s + self.jitter_s * self._random.random()
        return self.latency_s

    def _interested(self, subject: str) -> tuple[list[_Subscription], list[list[_Subscription]]]:
        found = self._interest.get(subject)
        if found is None:
            plain: list[_Subscription] = []
            groups: dict[str, list[_Subscription]] = {}
            for each in self._subscriptions:
                if each.connection.is_up and matches(each.pattern, subject):
                    (groups.setdefault(each.queue, []) if each.queue else plain).append(each)
            found = self._interest[subject] = (plain, list(groups.values()))
        return found

    def _process(self, process_id: str) -> SimulatedProcess:
        if process_id not in self._processes:
            self._processes[process_id] = SimulatedProcess(process_id)
        return self._processes[process_id]


def _take_all(subscriptions: list[_Subscription], parcel: Parcel) -> None:
    for subscription in subscriptions:
        subscription.take(parcel)


def _no_reply(responder: _Connection, data: bytes) -> None:
    pass


class _NoReply(Enum):
    LATE = "late"
    NOBODY = "nobody"


class SimulatedBus:
    def __init__(
        self,
        network: SimulatedNetwork,
        process_id: str,
        connection: _Connection,
        regions: RegionCheck | None = None,
    ) -> None:
        self.process_id = process_id
        self.regions = RegionCheck() if regions is None else regions
        self.max_payload_bytes = network.max_payload_bytes
        self.num_requests_under_way = 0
        self._network = network
        self._connection = connection
        self.process = connection.process
        self._sender_check = SenderCheck(lambda: network.loop.time(), self.regions)
        self._rejections = RejectedMessages(lambda: network.loop.time())
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._is_closed = False

    @property
    def is_connected(self) -> bool:
        return self._connection.is_up

    @property
    def num_reconnects(self) -> int:
        return self._connection.num_reconnects

    @property
    def num_sender_mismatches(self) -> int:
        return self._sender_check.num_sender_mismatches

    @property
    def site_bytes(self) -> SiteBytes:
        return self._sender_check.site_bytes

    @property
    def refused_sites(self) -> RefusedSites:
        return self._sender_check.refused_sites

    @property
    def server_name(self) -> str:
        return "simulated"

    @property
    def server_certificate_ends_at(self) -> float | None:
        return None

    def publish_bytes(self, subject: str, data: bytes) -> None:
        """Publishes arbitrary bytes."""
        parcel = Parcel(data, _no_reply, sent_by(subject, self.process_id))
        self._network.post(self._connection, subject, parcel)

    async def publish(self, subject: str, message: Message) -> None:
        sent_to = self.regions.subject_for(subject, message)
        self.publish_bytes(sent_to, self._payload(message))

    async def request(
        self,
        subject: str,
        message: Message,
        reply_type: type[M],
        *,
        timeout_s: float,
        on_late: Callable[[M | Failure | None], None] | None = None,
    ) -> M:
        data, sent_to = self._payload(message), self.regions.subject_for(subject, message)
        decode = _decoder_of(reply_type | Failure).decode
        loop = asyncio.get_running_loop()
        replied: asyncio.Future[bytes | _NoReply] = loop.create_future()
        late: asyncio.Future[bytes | _NoReply] = loop.create_future()

        def settle(reply: bytes | _NoReply) -> None:
            if not replied.done():
                replied.set_result(reply)
            elif not late.done():
                late.set_result(reply)

        def end(ended: asyncio.Future[bytes | _NoReply]) -> None:
            assert on_late is not None
            answer = ended.result()
            found = answer if isinstance(answer, bytes) else None
            on_late(late_reply(subject, decode, self._sender_check, found))

        def reply(responder: _Connection, answer: bytes) -> None:
            for tap in self._network.delivery_taps:
                tap(responder.process, f"{INBOX}.{subject}", answer, [self.process])
            self._network.answer(
                responder, self._connection, partial(settle, self._network.spoil_reply(answer))
            )

        timer = self.process.call_later(timeout_s, partial(settle, _NoReply.LATE))
        no_responders = partial(settle, _NoReply.NOBODY)
        self._network.send_request(
            self._connection,
            sent_to,
            Parcel(data, reply, sent_by(sent_to, self.process_id)),
            no_responders,
        )
        self.num_requests_under_way += 1
        try:
            answer = await replied
        finally:
            self.num_requests_under_way -= 1
            timer.cancel()
        if answer is _NoReply.LATE:
            if on_late is not None:
                late.add_done_callback(end)
                self.process.call_later(LATE_REPLY_S, partial(settle, _NoReply.LATE))
            raise RequestTimeout(f"no reply on {subject} within {timeout_s:g} s")
        if answer is _NoReply.NOBODY:
            raise NoResponders(f"nobody serves {subject}")
        try:
            decoded: M | Failure = decode(answer)
            self._sender_check.check_reply(subject, decoded)
        except (*UNREADABLE, SenderMismatch) as error:
            raise DependencyUnavailable(f"invalid reply on {subject}: {error}") from None
        if isinstance(decoded, Failure):
            raise error_of(decoded)
        return decoded

    async def subscribe(
        self,
        subject: str,
        message_type: Any,
        handler: Callable[[Any], None],
        *,
        queue: str = "",
        gather_s: float = 0.0,
    ) -> Unsubscribe:
        """As the real bus's, but nothing is gathered: a message costs no time here."""
        decode = _decoder_of(message_type).decode

        def decoded(parcel: Parcel) -> Any:
            return parcel.decoded(message_type, decode)

        def take(parcel: Parcel) -> None:
            checked = self._sender_check.checked(decoded, parcel.wire_subject)
            try:
                hand_over(subject, handler, checked, parcel, self._rejections)
            except Exception:  # like the real bus: one bad message does not end the subscription
                log.exception("subscriber_failed", subject=subject)

        return self._subscribe(subject, queue, take)

    async def serve(
        self, subject: str, message_type: Any, handler: Callable[[Any], Any], *, queue: str = ""
    ) -> Unsubscribe:
        decode = _decoder_of(message_type).decode

        async def answer(parcel: Parcel) -> None:
            checked = self._sender_check.checked(decode, parcel.wire_subject)
            wire_subject, data = parcel.wire_subject, parcel.data
            reply = await reply_to(wire_subject, handler, checked, data, self._rejections)
            encoded = _encode(reply)
            if not self._is_closed:
                parcel.reply(self._connection, encoded)

        def take(parcel: Parcel) -> None:
            task = asyncio.get_running_loop().create_task(answer(parcel))
            self._tasks[task] = None
            task.add_done_callback(self._tasks.pop)

        return self._subscribe(subject, queue, take)

    async def close(self) -> None:
        self._is_closed = True
        self._network.remove_all(self.process)
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _subscribe(
        self, pattern: str, queue: str, deliver: Callable[[Parcel], None]
    ) -> Unsubscribe:
        subscriptions = [
            _Subscription(self._connection, each, queue, deliver)
            for each in self.regions.subjects(pattern)
        ]
        for each in subscriptions:
            self._network.add(each)

        async def unsubscribe() -> None:
            for each in subscriptions:
                self._network.remove(each)

        return unsubscribe

    def _payload(self, message: Message) -> bytes:
        if self._is_closed:
            raise DependencyUnavailable("the bus is closed")
        data = _encode(message)
        if len(data) > self.max_payload_bytes:
            limit = self.max_payload_bytes
            raise PayloadTooLarge(
                f"the message has {len(data)} bytes; this bus accepts at most {limit}"
            )
        return data


@cache
def _decoder_of(message_type: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(message_type)

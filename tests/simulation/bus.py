"""NATS in memory: real msgpack, subjects with wildcards, queue groups, replies, and faults.

A message takes `latency_s`; messages to one subscription arrive in the order of their sending. A
frozen process neither sends nor receives until it is thawed (what others see of SIGSTOP); a
partition loses what crosses it; `is_dropped` loses single messages,
`spoil_reply` changes replies.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar

import msgspec

from shared.bus import Unsubscribe, error_of, hand_over, reply_to
from shared.decoding import UNREADABLE
from shared.errors import DependencyUnavailable, NoResponders, PayloadTooLarge, RequestTimeout
from shared.messages import Failure, Message

M = TypeVar("M", bound=Message)
Reply = Callable[[bytes], None]


def matches(pattern: str, subject: str) -> bool:
    """`*` stands for one token, a final `>` for one or more."""
    wanted, given = pattern.split("."), subject.split(".")
    if wanted[-1] == ">" and len(given) >= len(wanted):
        wanted, given = wanted[:-1], given[: len(wanted) - 1]
    return len(wanted) == len(given) and all(
        want in ("*", token) for want, token in zip(wanted, given, strict=True)
    )


@dataclass(eq=False)
class _Subscription:
    process_id: str
    pattern: str
    queue: str
    deliver: Callable[[bytes, Reply], None]
    arriving: deque[tuple[bytes, Reply]] = field(default_factory=deque)


class SimulatedNetwork:
    def __init__(
        self, *, seed: int = 0, latency_s: float = 0.0002, max_payload_bytes: int = 8 * 1024 * 1024
    ) -> None:
        self.latency_s = latency_s
        self.max_payload_bytes = max_payload_bytes
        self.is_dropped: Callable[[str, str, str], bool] = lambda subject, sender, receiver: False
        self.spoil_reply: Callable[[bytes], bytes] = lambda data: data
        self.is_down = False
        self.log: list[tuple[float, str, str]] = []  # (sent at, sender, subject)
        self._random = Random(seed)
        self._subscriptions: list[_Subscription] = []
        self._frozen: dict[str, list[Callable[[], object]]] = {}

    def bus(self, process_id: str) -> SimulatedBus:
        return SimulatedBus(self, process_id)

    def freeze(self, process_id: str) -> None:
        self._frozen.setdefault(process_id, [])

    def thaw(self, process_id: str) -> None:
        for act in self._frozen.pop(process_id, []):
            act()

    def disconnect(self, process_id: str) -> None:
        """What the server does when the process dies."""
        gone = [each for each in self._subscriptions if each.process_id == process_id]
        for subscription in gone:
            self.remove(subscription)

    def add(self, subscription: _Subscription) -> None:
        self._subscriptions.append(subscription)

    def remove(self, subscription: _Subscription) -> None:
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)

    def when_awake(self, process_id: str, act: Callable[[], object]) -> None:
        waiting = self._frozen.get(process_id)
        if waiting is None:
            act()
        else:
            waiting.append(act)

    def send(self, sender: str, subject: str, data: bytes, reply: Reply) -> int:
        """Returns how many subscriptions take it (all plain ones, one of each queue group)."""
        loop = asyncio.get_running_loop()
        self.log.append((loop.time(), sender, subject))
        if self.is_down:
            return 1  # nobody can tell that there is nobody
        receivers = self._receivers(subject)
        for subscription in receivers:
            if not self.is_dropped(subject, sender, subscription.process_id):
                subscription.arriving.append((data, reply))
                loop.call_later(self.latency_s, self._arrive, subscription)
        return len(receivers)

    def _receivers(self, subject: str) -> list[_Subscription]:
        interested = [each for each in self._subscriptions if matches(each.pattern, subject)]
        groups: dict[str, list[_Subscription]] = {}
        for each in interested:
            if each.queue:
                groups.setdefault(each.queue, []).append(each)
        chosen = [self._random.choice(members) for members in groups.values()]
        return [each for each in interested if not each.queue] + chosen

    def _arrive(self, subscription: _Subscription) -> None:
        data, reply = subscription.arriving.popleft()

        def deliver() -> None:
            if subscription in self._subscriptions:
                subscription.deliver(data, reply)

        self.when_awake(subscription.process_id, deliver)


def _no_reply(data: bytes) -> None:
    pass


class SimulatedBus:
    def __init__(self, network: SimulatedNetwork, process_id: str) -> None:
        self.process_id = process_id
        self.max_payload_bytes = network.max_payload_bytes
        self._network = network
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def publish(self, subject: str, message: Message) -> None:
        data = self._payload(message)
        network = self._network
        network.when_awake(
            self.process_id,
            lambda: network.send(self.process_id, subject, data, _no_reply),
        )

    async def request(
        self, subject: str, message: Message, reply_type: type[M], *, timeout_s: float
    ) -> M:
        data = self._payload(message)
        replied: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()

        def settle(reply: bytes | None) -> None:
            if not replied.done():
                replied.set_result(reply)

        def send() -> None:
            if self._network.send(self.process_id, subject, data, self._return(settle)) == 0:
                self._later(settle, None)

        self._network.when_awake(self.process_id, send)
        try:
            async with asyncio.timeout(timeout_s):
                answer = await replied
        except TimeoutError:
            raise RequestTimeout(f"no reply on {subject} within {timeout_s:g} s") from None
        if answer is None:
            raise NoResponders(f"nobody serves {subject}")
        try:
            decoded = msgspec.msgpack.decode(answer, type=reply_type | Failure)
        except UNREADABLE as error:
            raise DependencyUnavailable(f"a reply on {subject} makes no sense: {error}") from None
        if isinstance(decoded, Failure):
            raise error_of(decoded)
        return decoded

    async def subscribe(
        self, subject: str, message_type: Any, handler: Callable[[Any], None], *, queue: str = ""
    ) -> Unsubscribe:
        decode = msgspec.msgpack.Decoder(message_type).decode
        return self._listen(
            subject, queue, lambda data, reply: hand_over(subject, handler, decode, data)
        )

    async def serve(
        self, subject: str, message_type: Any, handler: Callable[[Any], Any], *, queue: str = ""
    ) -> Unsubscribe:
        decode = msgspec.msgpack.Decoder(message_type).decode

        async def answer(data: bytes, reply: Reply) -> None:
            encoded = msgspec.msgpack.encode(await reply_to(handler, decode, data))
            if not self._is_closed:
                self._network.when_awake(self.process_id, lambda: reply(encoded))

        def take(data: bytes, reply: Reply) -> None:
            task = asyncio.create_task(answer(data, reply))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        return self._listen(subject, queue, take)

    async def close(self) -> None:
        self._is_closed = True
        self._network.disconnect(self.process_id)
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _listen(
        self, pattern: str, queue: str, deliver: Callable[[bytes, Reply], None]
    ) -> Unsubscribe:
        subscription = _Subscription(self.process_id, pattern, queue, deliver)
        self._network.add(subscription)

        async def unsubscribe() -> None:
            self._network.remove(subscription)

        return unsubscribe

    def _return(self, settle: Callable[[bytes | None], None]) -> Reply:
        """The way back: one latency, and the requester must be awake to notice."""
        return lambda data: self._later(settle, self._network.spoil_reply(data))

    def _later(self, settle: Callable[[bytes | None], None], data: bytes | None) -> None:
        if self._network.is_down:
            return
        loop = asyncio.get_running_loop()
        loop.call_later(
            self._network.latency_s,
            lambda: self._network.when_awake(self.process_id, lambda: settle(data)),
        )

    def _payload(self, message: Message) -> bytes:
        if self._is_closed:
            raise DependencyUnavailable("the bus is closed")
        data = msgspec.msgpack.encode(message)
        if len(data) > self.max_payload_bytes:
            limit = self.max_payload_bytes
            raise PayloadTooLarge(
                f"the message has {len(data)} bytes; this bus takes at most {limit}"
            )
        return data

"""Checks whether the clients of open requests still listen.

    listening ──after CHECK_S: a message with a reply subject──▶ checked ──answer──▶ listening
                                              503, or no answer for SILENCE_S └──▶ lost

A client answers with an empty message. The NATS server answers 503 if nobody subscribes to the
client's inbox. Each check has its own reply subject, since the server counts messages by subject.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from services.gateway.nats_api.reply import NatsReply
from shared.background import failing_alone
from shared.clock import Clock
from shared.errors import DependencyUnavailable
from shared.transport.decoding.untyped_messages import UntypedMessages

log = structlog.get_logger(__name__)

CHECK_S = 2.0
SILENCE_S = 10.0
TICK_S = 0.5
_NO_RESPONDERS = b"NATS/1.0 503"


@dataclass(slots=True, eq=False)
class Listener:
    """The client of one request. `on_lost` is called at most once. `num_reconnects` is the gateway
    connection's count when the request arrived.
    """

    reply: NatsReply
    on_lost: Callable[[], None]
    num_reconnects: int
    checked_at: float
    answered_at: float
    num_checks: int = 0


class Listeners:
    def __init__(self, messages: UntypedMessages, clock: Clock) -> None:
        self._messages = messages
        self._clock = clock
        self._prefix = f"{messages.inbox}.check"
        self._num_opened = 0
        self._open: dict[str, Listener] = {}
        self._has_open = asyncio.Event()

    async def start(self) -> Callable[[], Awaitable[None]]:
        """Subscribes to answers. Returns a function that unsubscribes. `run` sends the checks."""
        return await self._messages.listen(f"{self._prefix}.*.*", self._on_answer)

    def open(self, reply: NatsReply, on_lost: Callable[[], None]) -> str:
        """Starts to check the client of a reply. Returns the name for `close`."""
        now, num_reconnects = self._clock.now(), self._messages.num_reconnects
        self._num_opened += 1
        name = str(self._num_opened)
        self._open[name] = Listener(reply, on_lost, num_reconnects, checked_at=now, answered_at=now)
        self._has_open.set()
        return name

    def close(self, name: str) -> None:
        """Stops checking the client. Idempotent."""
        self._open.pop(name, None)

    async def run(self) -> None:
        """Sends checks until it is cancelled."""
        while True:
            if not self._open:
                self._has_open.clear()
                await self._has_open.wait()
            await self._clock.sleep(TICK_S)
            await self._check_all()

    async def _check_all(self) -> None:
        """Checks all clients. A separate function, since variables of `run` would retain the last
        request.
        """
        for name, listener in list(self._open.items()):
            with failing_alone("check_failed"):
                await self._check(name, listener)

    async def _check(self, name: str, listener: Listener) -> None:
        now = self._clock.now()
        # A new connection has lost the gateway's permissions to send to these reply subjects.
        is_refused = listener.num_reconnects != self._messages.num_reconnects
        if is_refused or now - listener.answered_at >= SILENCE_S:
            self._lost(name)
        elif now - listener.checked_at >= CHECK_S:
            listener.checked_at = now
            listener.num_checks += 1
            try:
                await listener.reply.send(check=f"{self._prefix}.{name}.{listener.num_checks}")
            except DependencyUnavailable as error:
                log.warning("check_failed", error=error.message)

    async def _on_answer(self, subject: str, reply: str, data: bytes, headers: bytes) -> None:
        name = subject.rsplit(".", 2)[1]
        listener = self._open.get(name)
        if listener is None:
            return
        if headers.startswith(_NO_RESPONDERS):
            self._lost(name)
        else:
            listener.answered_at = self._clock.now()

    def _lost(self, name: str) -> None:
        listener = self._open.pop(name, None)
        if listener is not None:
            listener.on_lost()

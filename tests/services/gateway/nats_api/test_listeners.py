"""When a client counts as gone, on a clock of the test."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from services.gateway.dialects.dialect_table import DIALECTS
from services.gateway.nats_api.listeners import CHECK_S, SILENCE_S, TICK_S, Listeners
from services.gateway.nats_api.reply import NatsReply
from shared.errors import DependencyUnavailable


class Messages:
    """Records what is sent."""

    inbox = "_INBOX.gateway-1.-"

    def __init__(self) -> None:
        self.checks: list[str] = []
        self.is_away = False
        self.num_reconnects = 0

    async def listen(self, subject: str, take: Any, *, queue: str = "") -> None:
        self.subject, self.take = subject, take

    async def send(
        self, subject: str, data: bytes, *, headers: Mapping[str, str], reply: str
    ) -> None:
        if self.is_away:
            raise DependencyUnavailable("away")
        self.checks.append(reply)


class StepClock:
    """`advance` wakes whoever sleeps until then."""

    def __init__(self) -> None:
        self.time = 0.0
        self._slept = asyncio.Event()

    def now(self) -> float:
        return self.time

    async def sleep(self, delay_s: float) -> None:
        until = self.time + delay_s
        while self.time < until:
            self._slept.clear()
            await self._slept.wait()

    async def advance(self, duration_s: float) -> None:
        for _ in range(round(duration_s / TICK_S)):
            self.time += TICK_S
            self._slept.set()
            for _ in range(10):
                await asyncio.sleep(0)


class Checked:
    """One listener, checked by a running `Listeners`."""

    def __init__(self) -> None:
        self.messages, self.clock = Messages(), StepClock()
        self.listeners = Listeners(self.messages, self.clock)  # type: ignore[arg-type]
        self.num_lost = 0

    async def __aenter__(self) -> Checked:
        await self.listeners.start()
        self._running = asyncio.create_task(self.listeners.run())
        await asyncio.sleep(0)
        self.reply = NatsReply(
            self.messages,  # type: ignore[arg-type]
            "_INBOX.client-1.a",
            "r1",
            "g.-",
            DIALECTS[0].encode_error,
        )
        self.name = self.listeners.open(self.reply, self._lost)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)

    async def answer(self, headers: bytes = b"", check: str = "") -> None:
        await self.messages.take(check or self.messages.checks[-1], "", b"", headers)

    def _lost(self) -> None:
        self.num_lost += 1


async def test_client_that_answers_stays() -> None:
    async with Checked() as it:
        for _ in range(20):
            await it.clock.advance(CHECK_S)
            await it.answer()
        assert len(it.messages.checks) == 20 == len(set(it.messages.checks))
        assert it.num_lost == 0


async def test_client_without_an_answer_is_lost_after_the_silence() -> None:
    async with Checked() as it:
        await it.clock.advance(3 * CHECK_S)
        await it.answer(check=it.messages.checks[0])  # a late answer is one, too
        await it.clock.advance(SILENCE_S - TICK_S)
        assert it.num_lost == 0
        await it.clock.advance(TICK_S)
        assert it.num_lost == 1
        num_checks = len(it.messages.checks)
        await it.clock.advance(SILENCE_S)
        assert (it.num_lost, len(it.messages.checks)) == (1, num_checks)


async def test_client_that_nobody_listens_for_is_lost_at_once() -> None:
    async with Checked() as it:
        await it.clock.advance(CHECK_S)
        await it.answer(b"NATS/1.0 503\r\n\r\n")
        await it.answer(b"NATS/1.0 503\r\n\r\n")
        assert it.num_lost == 1


async def test_closed_and_unknown_listeners_are_not_checked() -> None:
    async with Checked() as it:
        it.listeners.close(it.name)
        it.listeners.close(it.name)
        await it.clock.advance(2 * SILENCE_S)
        assert (it.messages.checks, it.num_lost) == ([], 0)
        for check in ("_INBOX.gateway-1.-.check.9.1", "_INBOX.gateway-1.-.check.x.y"):
            await it.answer(check=check)
        it.listeners.open(it.reply, it._lost)  # `run` goes on with the next one
        await it.clock.advance(SILENCE_S)
        assert it.num_lost == 1


async def test_lost_connection_counts_as_silence() -> None:
    async with Checked() as it:
        it.messages.is_away = True
        await it.clock.advance(SILENCE_S)
        assert it.num_lost == 1


async def test_new_connection_ends_the_responses_of_the_last_one() -> None:
    """The server would refuse their next messages."""
    async with Checked() as it:
        it.messages.num_reconnects += 1
        await it.clock.advance(2 * TICK_S)
        assert (it.num_lost, it.messages.checks) == (1, [])
        it.messages.num_reconnects += 1  # while nobody listens
        it.listeners.open(it.reply, it._lost)
        await it.clock.advance(CHECK_S)
        assert (it.num_lost, len(it.messages.checks)) == (1, 1)


async def test_ended_response_gets_no_check() -> None:
    async with Checked() as it:
        await it.reply.finish(b"x")
        del it.messages.checks[:]
        await it.clock.advance(CHECK_S)
        assert it.messages.checks == []

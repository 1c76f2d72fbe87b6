"""Clients that send their requests again and again while a fleet is rolled.

A client repeats a request that was refused with a Retry-After, or whose connection was refused;
everything else than the known answer is a loss or a change.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import httpx

from services.client.hearth_nats import HearthClient
from tests.skew.dialects import Answer, Asked, all_requests, output_text
from tests.skew.fleet import RollingFleet
from tests.support.cluster.clients import Exchange, run_exchange
from tests.support.cluster.nats_clients import run_nats_exchange

MAX_TRIES = 60
PAUSE_S = 0.5  # before a refused request is sent again
REFUSED = (429, 503)


@dataclass
class Streams:
    """`async with` runs the clients until the end of the block, then waits for their answers."""

    fleet: RollingFleet
    nats: HearthClient
    requests: list[Asked] = field(default_factory=all_requests)
    expected: dict[int, object] = field(default_factory=dict)  # content of answers, by request
    answered: Counter[str] = field(default_factory=Counter)  # by dialect
    lost: list[str] = field(default_factory=list)
    altered: list[str] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)  # by what was said
    pushed: Counter[str] = field(default_factory=Counter)  # by the releases of both workers
    num_resubmitted: int = 0
    stored: dict[str, str] = field(default_factory=dict)  # text of stored responses by their id
    num_runs: int = 0
    step: str = "before"  # of the roll, for what is recorded
    _is_over: bool = False
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def learn(self) -> None:
        """Takes the answers of an undisturbed fleet, twice: they must be equal."""
        for _ in range(2):
            await asyncio.gather(*(self._run(index) for index in range(len(self.requests))))
        assert not self.lost and not self.altered, (self.lost, self.altered)

    async def __aenter__(self) -> Streams:
        self._is_over = False
        self._tasks = [asyncio.create_task(self._client(n)) for n in range(len(self.requests))]
        return self

    async def __aexit__(self, *error: object) -> None:
        self._is_over = True
        await asyncio.gather(*self._tasks)

    async def _client(self, index: int) -> None:
        while not self._is_over:
            await self._run(index)

    async def _run(self, index: int) -> None:
        asked, releases = self.requests[index], self._releases()
        answer, exchange = await self._ask(asked, index)
        if answer is None:
            return
        expected = self.expected.setdefault(index, answer.content)
        self.answered[asked.name] += 1
        if not answer.is_complete:
            self._lose(f"{asked.name} {index}: {exchange} {exchange.events[-3:]}", exchange)
        elif answer.content != expected:
            self.altered.append(f"{asked.name} {index}: {answer.content} is not {expected}")
        elif answer.response_id:
            self.stored[answer.response_id] = str(answer.content[0])  # type: ignore[index]
        self._count_pushes(exchange, releases)

    async def _ask(self, asked: Asked, index: int) -> tuple[Answer | None, Exchange]:
        gateways = [*self.fleet.urls]
        for number in range(MAX_TRIES):
            self.num_runs += 1
            gateway = gateways[(index + number) % len(gateways)]
            salt = {"cache_salt": f"run {self.num_runs}"} if asked.salted else {}
            exchange = Exchange({**asked.body, **salt}, gateway)
            await self._send(asked, exchange)
            if exchange.status in REFUSED and exchange.has_retry_after:
                self.refused[f"{exchange.status} {exchange.events[-1:]}"] += 1
            elif exchange.status == 0 and "ConnectionRefused" in exchange.failure:
                self.refused["connection"] += 1
            elif exchange.status != 200 or exchange.failure:
                break
            else:
                return asked.read(exchange), exchange
            await asyncio.sleep(PAUSE_S)
        self._lose(f"{asked.name} {index}: {exchange}, try {number}", exchange)
        return None, exchange

    def _lose(self, what: str, exchange: Exchange) -> None:
        took_s = exchange.ended - exchange.started
        self.lost.append(f"after {took_s:.1f} s, now {self.step}: {what}")

    async def _send(self, asked: Asked, exchange: Exchange) -> None:
        if asked.is_nats:
            await run_nats_exchange(exchange, self.nats, asked.path)
        else:
            url = self.fleet.urls[exchange.gateway]
            await run_exchange(exchange, url, self.fleet.api_key, asked.path)

    def _releases(self) -> Mapping[str, str]:
        return {name: each.name for name, each in self.fleet.release_of.items()}

    def _count_pushes(self, exchange: Exchange, before: Mapping[str, str]) -> None:
        """Counts a push between workers that were not replaced while it ran."""
        if exchange.status != 200 or b'"hearth"' not in b"".join(exchange.events[-2:]):
            return
        info, after = exchange.metadata, self._releases()
        self.num_resubmitted += info.get("num_resubmissions", 0) > 0
        pair = info.get("prefill_worker"), info.get("decode_worker")
        is_pushed = info.get("num_pushed_tokens") and None not in pair
        if is_pushed and all(before[each] == after[each] for each in pair):
            self.pushed[" to ".join(after[each] for each in pair)] += 1

    async def read_stored(self) -> int:
        """Reads all stored responses at every gateway, and returns how many; differences are
        recorded as `altered`, missing ones as `lost`.
        """
        headers = {"Authorization": f"Bearer {self.fleet.api_key}"}
        async with httpx.AsyncClient(headers=headers, timeout=30, trust_env=False) as client:
            for url in self.fleet.urls.values():
                for response_id, text in self.stored.items():
                    reply = await client.get(f"{url}/v1/responses/{response_id}")
                    if reply.status_code != 200:
                        self.lost.append(f"stored {response_id}: {reply.status_code} {reply.text}")
                    elif output_text(reply.json()) != text:
                        self.altered.append(f"stored {response_id}: {reply.text}")
        return len(self.stored)

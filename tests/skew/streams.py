"""Clients that send their requests again and again while a fleet is rolled.

A client repeats a request that was refused with a Retry-After, or whose connection was refused;
everything else than the known answer is a loss or a change.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
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
AVOIDED_S = 5.0  # a gateway that refused: balancers take it out
REFUSED = (429, 503)
MAX_READ = 60  # stored responses at the end of a roll, of all that there are


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
    _refused_at: dict[str, float] = field(default_factory=dict)  # by gateway
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
        for number in range(MAX_TRIES):
            self.num_runs += 1
            gateway, losses = self._gateway(index + number), self._num_losses
            salt = {"cache_salt": f"run {self.num_runs}"} if asked.salted else {}
            exchange = Exchange({**asked.body, **salt}, gateway)
            await self._send(asked, exchange)
            if exchange.status in REFUSED and exchange.has_retry_after:
                self.refused[f"{exchange.status} {exchange.events[-1:]}"] += 1
                self._refused_at[gateway] = time.monotonic()
            elif asked.is_nats and losses != self._num_losses:
                self.refused["the client's own connection to NATS was lost"] += 1
            elif exchange.status == 0 and "ConnectionRefused" in exchange.failure:
                self.refused["connection"] += 1
                self._refused_at[gateway] = time.monotonic()
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

    def _gateway(self, number: int) -> str:
        """Returns one in turn of those that have not just refused a request, if there are any."""
        since, names = time.monotonic() - AVOIDED_S, [*self.fleet.urls]
        open_ones = [each for each in names if self._refused_at.get(each, 0.0) < since] or names
        return open_ones[number % len(open_ones)]

    @property
    def _num_losses(self) -> int:
        """Of the NATS client's connection: a server drops who does not answer for 3 s."""
        return int(self.nats._connection.stats["reconnects"])

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
        """Reads stored responses of all times, each at one gateway, and returns how many;
        differences are recorded as `altered`, missing ones as `lost`.
        """
        some = random.Random(len(self.stored)).sample(
            [*self.stored.items()], min(MAX_READ, len(self.stored))
        )
        urls = itertools.cycle(self.fleet.urls.values())
        headers = {"Authorization": f"Bearer {self.fleet.api_key}"}
        async with httpx.AsyncClient(headers=headers, timeout=30, trust_env=False) as client:
            for response_id, text in some:
                reply = await client.get(f"{next(urls)}/v1/responses/{response_id}")
                if reply.status_code != 200:
                    self.lost.append(f"stored {response_id}: {reply.status_code} {reply.text}")
                elif output_text(reply.json()) != text:
                    self.altered.append(f"stored {response_id}: {reply.text}")
        return len(some)

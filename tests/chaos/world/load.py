"""Clients that send requests without pause, or leave in the middle of a response."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from services.client.http_client import http_request
from tests.chaos.chaos import Asked, Chaos

LONGEST_STAY_S = 1.0
NUM_CLIENTS = 16
RENDER_TIMEOUT = 4000  # max_tokens: takes a minute if not aborted


@dataclass
class Steady:
    """`async with` runs `num_clients` clients until the end of the block, then waits for them.

    Only failures are stored, so that it may run for long: broken in the middle, without a response,
    or with another response than undisturbed.
    """

    chaos: Chaos
    num_clients: int = NUM_CLIENTS
    num_asked: int = 0
    num_resubmitted: int = 0
    num_refused: int = 0  # tries
    num_tokens: int = 0
    failed: list[Asked] = field(default_factory=list)
    _is_over: bool = False
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def __aenter__(self) -> Steady:
        self._tasks = [asyncio.create_task(self._client(n)) for n in range(self.num_clients)]
        return self

    async def __aexit__(self, *error: object) -> None:
        self._is_over = True
        await asyncio.gather(*self._tasks)

    async def _client(self, number: int) -> None:
        draw = random.Random(number)
        gateways = [*self.chaos.cluster.urls]
        while not self._is_over:
            index = draw.randrange(len(self.chaos.requests))
            path, body = self.chaos.requests[index]
            asked = Asked(path, {**body, "cache_salt": f"{number} {draw.random()}"})
            draw.shuffle(gateways)
            await self.chaos.ask(asked, gateways)
            self._count(index, asked)

    def _count(self, index: int, asked: Asked) -> None:
        is_cut = any(each.is_broken and each.status == 200 for each in asked.tries)
        is_same = asked.last.is_whole and self.chaos.is_same(index, asked.last)
        if is_cut or not is_same:
            self.failed.append(asked)
        self.num_asked += 1
        self.num_tokens += sum(asked.last.usage)
        self.num_resubmitted += asked.last.served.get("num_resubmissions", 0) > 0
        self.num_refused += sum(each.status != 200 for each in asked.tries)


async def leave_early(chaos: Chaos, count: int, *, at_once: int = 48) -> None:
    """`count` clients that send a request and leave after a random time, in any phase."""
    limit, draw = asyncio.Semaphore(at_once), random.Random(count)

    async def one(number: int) -> None:
        async with limit:
            await _leave_after(chaos, number, draw.random() ** 2 * LONGEST_STAY_S, draw.random())

    await asyncio.gather(*(one(number) for number in range(count)))


async def _leave_after(chaos: Chaos, number: int, stay_s: float, chance: float) -> None:
    url = [*chaos.cluster.urls.values()][number % len(chaos.cluster.urls)]
    path, body = chaos.requests[number % len(chaos.requests)]
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    endless = {**body, "max_tokens": RENDER_TIMEOUT, "stop": None}
    if chance < 0.7:
        endless["cache_salt"] = f"leaves {number}"
    writer.write(http_request(url, chaos.cluster.api_key, path, endless))
    try:
        async with asyncio.timeout(stay_s):
            while await reader.read(65536):
                pass
    except TimeoutError:
        pass
    if chance < 0.5:
        writer.transport.abort()  # without FIN, like a failed machine
    writer.close()

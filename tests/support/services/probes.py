"""The times that processes take to answer their probes."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from statistics import median

import httpx

from services.client.load_test import percentile

INTERVAL_S = 0.02
TIMEOUT_S = 10.0


class Probes:
    """Requests the probes at `urls`, by process, while the context is open."""

    def __init__(self, urls: Mapping[str, str]) -> None:
        self.num_failed: Counter[str] = Counter()
        self._urls = urls
        self._times_s: dict[str, list[float]] = {name: [] for name in urls}

    async def __aenter__(self) -> Probes:
        self._tasks = [asyncio.create_task(self._sample(*each)) for each in self._urls.items()]
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def p50_ms(self, name: str) -> float:
        return median(self._times_s[name]) * 1000

    def p99_ms(self, name: str) -> float:
        return percentile(self._times_s[name], 99) * 1000

    def max_ms(self, name: str) -> float:
        return max(self._times_s[name]) * 1000

    async def _sample(self, name: str, url: str) -> None:
        async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as client:
            while True:
                began = time.perf_counter()
                try:
                    is_well = (await client.get(url)).status_code == 200
                except httpx.HTTPError:
                    is_well = False
                self._times_s[name].append(time.perf_counter() - began)
                self.num_failed[name] += not is_well
                await asyncio.sleep(INTERVAL_S)

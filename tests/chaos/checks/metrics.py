"""Whether a fault moves the metrics that its line of the runbook names."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import httpx

import services.deploy

RUNBOOK = Path(services.deploy.__file__).with_name("README.md")
POLL_S = 0.25
LAST_WAIT_S = 3.0  # a heartbeat brings a count to the gateway
LINE = re.compile(r"^\| (?P<faults>[a-z, ]+) \| `(?P<role>[\w-]+)` \| (?P<metrics>`hearth_.*`) \|$")

Series = Mapping[str, float]  # by name and labels, as exposed


def runbook_metrics(fault: str, process: str) -> list[str]:
    """What the runbook names for this fault of a process or server. Raises ValueError for none."""
    for line in RUNBOOK.read_text().splitlines():
        found = LINE.match(line)
        if found is None or fault not in found["faults"].split(", "):
            continue
        if process == found["role"] or process.startswith(f"{found['role']}-"):
            return re.findall(r"`(hearth_[^`]+)`", found["metrics"])
    raise ValueError(f"the runbook has no line for {fault} of {process}")


async def scrape(client: httpx.AsyncClient, url: str) -> Series:
    text = (await client.get(f"{url}/metrics")).text
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {series: float(value) for series, _, value in lines}


class MetricWatch:
    """Polls gateways until each of `names`, such as `metric{label="value"}`, has moved at one."""

    def __init__(self, urls: Iterable[str], names: list[str]) -> None:
        self.names = names
        self._urls = list(urls)
        self._unmoved = list(names)
        self._client = httpx.AsyncClient(timeout=5.0, trust_env=False)
        self._polls: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        before = [await scrape(self._client, url) for url in self._urls]
        for url, series in zip(self._urls, before, strict=True):
            self._polls.append(asyncio.create_task(self._poll(url, series)))

    @property
    def has_moved(self) -> bool:
        return len(self._unmoved) < len(self.names)

    async def unmoved(self) -> list[str]:
        """Call after the fault. Returns the names of which no series has moved."""
        assert self._polls, "started"
        is_first = asyncio.FIRST_COMPLETED
        await asyncio.wait(self._polls, timeout=LAST_WAIT_S, return_when=is_first)
        for each in self._polls:
            each.cancel()
        await asyncio.gather(*self._polls, return_exceptions=True)
        await self._client.aclose()
        return self._unmoved

    async def _poll(self, url: str, before: Series) -> None:
        while self._unmoved:
            with suppress(httpx.HTTPError):  # this gateway may be the victim
                now = await scrape(self._client, url)
                self._unmoved = [each for each in self._unmoved if not has_moved(each, before, now)]
            await asyncio.sleep(POLL_S)


def has_moved(name: str, before: Series, now: Series) -> bool:
    """A series that a process no longer exports has moved too."""
    metric, _, labels = name.rstrip("}").partition("{")
    wanted = labels.split(",") if labels else []
    return any(
        before.get(series) != now.get(series)
        for series in {*before, *now}
        if series.partition("{")[0] == metric and all(each in series for each in wanted)
    )

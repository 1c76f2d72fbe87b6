"""Whether a fault moves the metrics that its line of the runbook names."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
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
    """Polls a gateway until all `names`, such as `metric{label="value"}`, have moved."""

    def __init__(self, url: str, names: list[str]) -> None:
        self.names = names
        self._url = url
        self._unmoved = list(names)
        self._before: Series = {}
        self._client = httpx.AsyncClient(timeout=5.0, trust_env=False)
        self._polling: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._before = await scrape(self._client, self._url)
        self._polling = asyncio.create_task(self._poll())

    async def unmoved(self) -> list[str]:
        """Call after the fault. Returns the names of which no series has moved."""
        assert self._polling is not None, "started"
        await asyncio.wait({self._polling}, timeout=LAST_WAIT_S)
        self._polling.cancel()
        await asyncio.gather(self._polling, return_exceptions=True)
        await self._client.aclose()
        return self._unmoved

    async def _poll(self) -> None:
        while self._unmoved:
            now = await scrape(self._client, self._url)
            self._unmoved = [
                each for each in self._unmoved if not has_moved(each, self._before, now)
            ]
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

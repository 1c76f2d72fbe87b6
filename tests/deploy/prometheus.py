"""A real Prometheus over one gateway, with the shipped rules and a shorter `for`."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.deploy.rules import ALERTS
from tests.support.servers import Server, free_port

BINARY = shutil.which(os.environ.get("HEARTH_PROMETHEUS", "prometheus"))
INTERVAL, FOR = "1s", "2s"
POLL_S = 0.5
NUM_SCRAPES = 3  # before a fault
START_TIMEOUT_S = 30.0


class Prometheus:
    """Scrapes `url`. Needs BINARY."""

    def __init__(self, folder: Path, url: str) -> None:
        assert BINARY is not None
        rules: dict[str, Any] = yaml.safe_load(ALERTS.read_text())
        for rule in rules["groups"][0]["rules"]:
            if "for" in rule:
                rule["for"] = FOR
        (folder / "rules.yml").write_text(yaml.safe_dump(rules))
        config = {
            "global": {"scrape_interval": INTERVAL, "evaluation_interval": INTERVAL},
            "rule_files": [str(folder / "rules.yml")],
            "scrape_configs": [
                {
                    "job_name": "hearth",
                    "static_configs": [{"targets": [url.removeprefix("http://")]}],
                }
            ],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        self._server = Server(
            [
                BINARY,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=error",
            ],
            port,
        )

    def stop(self) -> None:
        self._server.stop()

    async def scraped(self) -> None:
        """Returns after some scrapes: an increase is counted from one before the fault."""
        query = {"query": f"count_over_time(up[1m]) >= {NUM_SCRAPES}"}
        async with httpx.AsyncClient(trust_env=False) as client, asyncio.timeout(START_TIMEOUT_S):
            while True:
                answer = (await client.get(f"{self._url}/api/v1/query", params=query)).json()
                if answer["data"]["result"]:
                    return
                await asyncio.sleep(POLL_S)

    async def firing(self) -> set[str]:
        async with httpx.AsyncClient(trust_env=False) as client:
            answer = (await client.get(f"{self._url}/api/v1/alerts")).json()
        alerts = answer["data"]["alerts"]
        return {each["labels"]["alertname"] for each in alerts if each["state"] == "firing"}

    async def unraised(self, names: Collection[str], timeout_s: float) -> set[str]:
        """Waits until all have been raised. Returns those that were not."""
        give_up_at, missing = time.monotonic() + timeout_s, set(names)
        while missing and time.monotonic() < give_up_at:
            missing -= await self.firing()
            await asyncio.sleep(POLL_S)
        return missing

"""Causes real faults in a real cluster for the alerts of services/deploy/alerts.yml.

    python -m tests.deploy.record           writes recorded/NAME.yml, which promtool tests
    python -m tests.deploy.record --live    a Prometheus scrapes a gateway: it must raise the alerts

Recorded are the series that an alert's expression names, every INTERVAL_S, from before the fault.
With --live the rules' `for` is shorter. The exit status is 1 if an alert is not raised.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.chaos.checks.metrics import Series, scrape
from tests.chaos.running import TIMING_STEP_S, WORKERS
from tests.chaos.world.cluster import ChaosCluster
from tests.deploy.prometheus import BINARY, Prometheus
from tests.deploy.rules import metrics_of
from tests.deploy.scenarios import SCENARIOS, Scenario, streams

RECORDED = Path(__file__).with_name("recorded")
INTERVAL_S = 5
NUM_BEFORE = 3  # scrapes before the fault
LIVE_TIMEOUT_S = 60.0
HEAD = "# Written by `python -m tests.deploy.record` from a real cluster; not to be edited.\n"


async def record(cluster: ChaosCluster, scenario: Scenario) -> None:
    url, taken = [*cluster.urls.values()][-1], []
    num_after = round(scenario.lasts_s / INTERVAL_S)
    cause: asyncio.Task[None] | None = None
    async with httpx.AsyncClient(timeout=INTERVAL_S, trust_env=False) as client:
        started = time.monotonic()
        while cause is None or not cause.done() or len(taken) < NUM_BEFORE + num_after:
            taken.append(await scrape(client, url))
            if len(taken) == NUM_BEFORE:
                cause = asyncio.create_task(scenario.cause(cluster))
            await asyncio.sleep(started + len(taken) * INTERVAL_S - time.monotonic())
        taken.append(await scrape(client, url))
    file = RECORDED / f"{scenario.name}.yml"
    file.write_text(
        HEAD + yaml.safe_dump(promtool_test(scenario, taken), sort_keys=False, width=1000)
    )


def promtool_test(scenario: Scenario, taken: list[Series]) -> dict[str, Any]:
    metrics = set().union(*(metrics_of(each) for each in scenario.alerts))
    names = sorted({series for each in taken for series in each})
    given = [
        {"series": name, "values": " ".join(_value(each, name) for each in taken)}
        for name in names
        if name.partition("{")[0] in metrics
    ]
    before_s, last_s = INTERVAL_S * (NUM_BEFORE - 1), INTERVAL_S * (len(taken) - 1)
    return {
        "rule_files": ["../../../services/deploy/alerts.yml"],
        "evaluation_interval": f"{INTERVAL_S}s",
        "tests": [
            {
                "name": scenario.name,
                "interval": f"{INTERVAL_S}s",
                "input_series": given,
                "promql_expr_test": [
                    _expected(alert, at_s, is_raised=at_s == last_s)
                    for alert in scenario.alerts
                    for at_s in (before_s, last_s)
                ],
            }
        ],
    }


def _value(scraped: Mapping[str, float], name: str) -> str:
    return f"{scraped[name]:g}" if name in scraped else "_"


def _expected(alert: str, at_s: int, *, is_raised: bool) -> dict[str, Any]:
    expression = f'max by (alertname) (ALERTS{{alertname="{alert}",alertstate="firing"}})'
    sample = {"labels": f'{{alertname="{alert}"}}', "value": 1}
    samples = [sample] if is_raised else []
    return {"expr": expression, "eval_time": f"{at_s}s", "exp_samples": samples}


async def raise_alerts(cluster: ChaosCluster, prometheus: Prometheus, scenario: Scenario) -> bool:
    await prometheus.scraped()
    cause = asyncio.create_task(scenario.cause(cluster))
    missing = await prometheus.unraised(scenario.alerts, LIVE_TIMEOUT_S)
    await cause
    raised = [each for each in scenario.alerts if each not in missing]
    print(f"{scenario.name}: raised {raised}, not raised {sorted(missing)}", flush=True)
    return not missing


async def run(scenario: Scenario, *, is_live: bool) -> bool:
    """Whether the alerts were raised; without a Prometheus, True."""
    folder, prometheus, is_raised = Path(tempfile.mkdtemp(prefix="hearth-alerts-")), None, True
    cluster = ChaosCluster(
        folder,
        step_s=TIMING_STEP_S,
        worker_options=WORKERS,
        environ_of={f"gateway-{number}": scenario.environ for number in (1, 2)},
    )
    try:
        await cluster.start()
        if is_live:
            prometheus = Prometheus(folder, [*cluster.urls.values()][-1])
        async with streams(cluster):
            if prometheus is None:
                await record(cluster, scenario)
            else:
                is_raised = await raise_alerts(cluster, prometheus, scenario)
            await scenario.repair(cluster)
    finally:
        if prometheus is not None:
            prometheus.stop()
        cluster.stop()
    return is_raised


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.deploy.record", description=__doc__)
    parser.add_argument("--live", action="store_true", help="with a Prometheus, instead of files")
    all_names = [each.name for each in SCENARIOS]
    parser.add_argument("--scenario", action="append", choices=all_names)
    options = parser.parse_args()
    if options.live and BINARY is None:
        print("No prometheus: no alert is raised live (apt-get install prometheus)")
        return 0
    wanted = options.scenario or all_names
    raised = [
        asyncio.run(run(each, is_live=options.live)) for each in SCENARIOS if each.name in wanted
    ]
    return int(not all(raised))


if __name__ == "__main__":
    sys.exit(main())

"""Causes real faults in a real cluster for the alerts of services/deploy/alerts.yml.

    python -m tests.deploy.record           writes recorded/NAME.yml, which promtool tests
    python -m tests.deploy.record --live    a Prometheus scrapes a gateway: it must raise the alerts

Recorded are the series that an alert's expression names, every `interval_s`, from before the fault.
With --live the rules' `for` is shorter, and of the scenarios that need more than a gateway's
metrics or more time, none is run unless --scenario names it. The exit status is 1 if an alert is
not raised.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.chaos.checks.metrics import Series, scrape
from tests.deploy.prometheus import BINARY, Prometheus
from tests.deploy.rules import metrics_of
from tests.deploy.scenarios import SCENARIOS, Scenario, streams
from tests.support.cluster.chaos_cluster import ChaosCluster

RECORDED = Path(__file__).with_name("recorded")
NUM_BEFORE = 3  # scrapes before the fault
LIVE_TIMEOUT_S = 60.0
HEAD = "# Written by `python -m tests.deploy.record` from a real cluster; not to be edited.\n"


async def record(cluster: ChaosCluster, scenario: Scenario) -> None:
    url, taken = [*cluster.urls.values()][-1], []
    interval_s = scenario.interval_s
    num_after = round(scenario.lasts_s / interval_s)
    cause: asyncio.Task[None] | None = None
    async with httpx.AsyncClient(timeout=interval_s, trust_env=False) as client:
        started = time.monotonic()
        while len(taken) < NUM_BEFORE + num_after:
            taken.append(await _scrape_all(client, url, scenario))
            if len(taken) == NUM_BEFORE:
                cause = asyncio.create_task(scenario.cause(cluster))
            await asyncio.sleep(started + len(taken) * interval_s - time.monotonic())
        taken.append(await _scrape_all(client, url, scenario))
    await _end(cause)
    file = RECORDED / f"{scenario.name}.yml"
    file.write_text(
        HEAD + yaml.safe_dump(promtool_test(scenario, taken), sort_keys=False, width=1000)
    )


async def _end(cause: asyncio.Task[None] | None) -> None:
    """Of a load, which has no end itself. Raises what a fault has raised."""
    assert cause is not None, "there are scrapes before and after it"
    cause.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await cause


async def _scrape_all(client: httpx.AsyncClient, url: str, scenario: Scenario) -> Series:
    """Of a gateway, and with the label `instance` of the processes' own ports."""
    series = {**await scrape(client, url)}
    for process, port in scenario.metrics_ports.items():
        of_process = await scrape(client, f"http://127.0.0.1:{port}")
        series |= {_of_instance(name, process): each for name, each in of_process.items()}
    return series


def _of_instance(series: str, instance: str) -> str:
    name, _, labels = series.rstrip("}").partition("{")
    return f'{name}{{{labels}{"," if labels else ""}instance="{instance}"}}'


def promtool_test(scenario: Scenario, taken: list[Series]) -> dict[str, Any]:
    metrics = set().union(*(metrics_of(each) for each in scenario.alerts))
    names = sorted({series for each in taken for series in each})
    given = [
        {"series": name, "values": " ".join(_value(each, name) for each in taken)}
        for name in names
        if name.partition("{")[0] in metrics
    ]
    interval_s = scenario.interval_s
    before_s, last_s = interval_s * (NUM_BEFORE - 1), interval_s * (len(taken) - 1)
    return {
        "rule_files": ["../../../services/deploy/alerts.yml"],
        "evaluation_interval": f"{interval_s}s",
        "tests": [
            {
                "name": scenario.name,
                "interval": f"{interval_s}s",
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
    """Raised at any time until then: the oldest wait of a queue rises and falls."""
    firing = f'ALERTS{{alertname="{alert}",alertstate="firing"}}'
    expression = f"max by (alertname) (max_over_time({firing}[{at_s}s]))"
    sample = {"labels": f'{{alertname="{alert}"}}', "value": 1}
    samples = [sample] if is_raised else []
    return {"expr": expression, "eval_time": f"{at_s}s", "exp_samples": samples}


async def raise_alerts(cluster: ChaosCluster, prometheus: Prometheus, scenario: Scenario) -> bool:
    await prometheus.scraped()
    cause = asyncio.create_task(scenario.cause(cluster))
    missing = await prometheus.unraised(scenario.alerts, LIVE_TIMEOUT_S)
    await _end(cause)
    raised = [each for each in scenario.alerts if each not in missing]
    print(f"{scenario.name}: raised {raised}, not raised {sorted(missing)}", flush=True)
    return not missing


async def run(scenario: Scenario, *, is_live: bool) -> bool:
    """Whether the alerts were raised; without a Prometheus, True."""
    folder, prometheus, is_raised = Path(tempfile.mkdtemp(prefix="hearth-alerts-")), None, True
    for name in scenario.unread_logs:
        os.mkfifo(folder / f"{name}.log")
        os.open(folder / f"{name}.log", os.O_RDWR)  # until the end: a log needs a reader to open
    cluster = ChaosCluster(
        folder,
        step_s=scenario.step_s,
        worker_options=scenario.worker_options,
        scheduler_options=scenario.scheduler_options,
        environ_of=scenario.environ_of,
        options_of={n: {"metrics-port": str(p)} for n, p in scenario.metrics_ports.items()},
    )
    try:
        await cluster.start()
        if is_live:
            prometheus = Prometheus(folder, [*cluster.urls.values()][-1])
        async with streams(cluster, scenario.stream_tokens):
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
    usual = [each.name for each in SCENARIOS if each.is_live or not options.live]
    wanted = options.scenario or usual
    raised = [
        asyncio.run(run(each, is_live=options.live)) for each in SCENARIOS if each.name in wanted
    ]
    return int(not all(raised))


if __name__ == "__main__":
    sys.exit(main())

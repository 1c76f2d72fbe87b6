"""The cost of the gateway's page: its size, first paint and frames of a fast answer, and the CPU
time of gateway and browser while a tab shows a fleet.

    python -m benchmarks.page

It needs chromium, and .venv-clients/browser, which `scripts/test --clients` makes.

The gateway is real; its peers are `fleet.py`'s.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import httpx

from benchmarks.page.fleet import SCHEDULER, Workers, region_of
from benchmarks.report import ROOT, Row, at_least, at_most, write_result
from benchmarks.serving.closed_loop import ClientKind, Tally, Target, load
from benchmarks.serving.cluster import ONE_WORKER, credentials, hearth
from services.cli.cluster.service_options import DEMO_MODEL_DIR, DEMO_MODEL_NAME
from services.gateway.operator.page.files import read_files
from services.local.servers import free_port
from shared.subjects import CredentialRole
from shared.tenancy.tenant_admin import save_api_key
from shared.transport.server_config import NatsUser
from tests.support.cluster.service_processes import OPERATOR_TOKEN
from tests.support.servers import PASSWORD, NatsServer, RedisServer

PYTHON = ROOT / ".venv-clients" / "browser" / "bin" / "python"
API_KEY, TOKEN = "key-of-the-page", OPERATOR_TOKEN
SECONDS = 20.0
FLEETS = (3, 200)
NUM_TABS = 100
NUM_STREAMS, STEP_S = 500, 0.25  # 2,000 tokens a second


@contextlib.contextmanager
def gateway(server: NatsServer, redis: RedisServer) -> Iterator[tuple[str, int]]:
    """Yields its address and its pid."""
    port = free_port("127.0.0.1")
    environ = os.environ | {
        "HEARTH_NATS_URL": server.url("gateway-1"),
        "HEARTH_REDIS_URL": redis.url,
        "HEARTH_OPERATOR_TOKEN": TOKEN,
        "HEARTH_LAME_DUCK_S": "0",
    }
    command = [sys.executable, "-m", "services", "gateway", "--http-port", str(port)]
    process = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, cwd=ROOT)
    url = f"http://127.0.0.1:{port}"
    try:
        while not _answers(url):
            assert process.poll() is None, "the gateway ended"
            time.sleep(0.1)
        yield url, process.pid
    finally:
        process.terminate()
        process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def share_of_core(pid: int, duration_s: float) -> float:
    before, started = cpu_s(pid), time.monotonic()
    await asyncio.sleep(duration_s)
    return (cpu_s(pid) - before) / (time.monotonic() - started)


def open_tab(
    python: Path, mode: str, url: str, *arguments: str, api_key: str = API_KEY
) -> subprocess.Popen[str]:
    command = [python, "-m", "benchmarks.page.tab", mode, url, api_key, TOKEN, *arguments]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environ)


async def figures(tab: subprocess.Popen[str]) -> dict[str, Any]:
    """Returns the next line of a tab."""
    output: IO[str] | None = tab.stdout
    assert output is not None
    line = await asyncio.to_thread(output.readline)
    assert line, "the tab ended"
    found: dict[str, Any] = json.loads(line)
    return found


async def bytes_per_s(url: str, duration_s: float = 5.0) -> float:
    """Returns the bytes per second of the stream of events, without its snapshot."""
    num_bytes, started = 0, None
    headers = {"authorization": f"Bearer {TOKEN}"}
    async with (
        httpx.AsyncClient(base_url=url, headers=headers, timeout=30) as http,
        http.stream("GET", "/v1/cluster/events") as response,
    ):
        async for chunk in response.aiter_raw():
            if started is None:
                started = time.monotonic()
                continue
            num_bytes += len(chunk)
            if time.monotonic() - started > duration_s:
                break
    assert started is not None
    return num_bytes / (time.monotonic() - started)


async def measure_fleet(python: Path, server: NatsServer, redis: RedisServer, num: int) -> Row:
    fleet = Workers(server, num)
    with gateway(server, redis) as (url, pid):
        async with fleet.running():
            await asyncio.sleep(3.0)
            closed = await share_of_core(pid, SECONDS / 2)
            watched = f"decode-{num}"
            tab = open_tab(python, "cluster", url, watched)
            await figures(tab)
            opened = await share_of_core(pid, SECONDS - 1)
            longest = await figures(tab)
            fleet.silent.add(watched)
            silent_at = time.time()
            lost = await figures(tab)
            tab.wait()
            rate = await bytes_per_s(url)
    return {
        "workers": num,
        "gateway_cpu_without_tab": round(closed, 4),
        "gateway_cpu_with_tab": round(opened, 4),
        **longest,
        "silent_worker_shown_s": round(lost["lost_at"] - silent_at, 2),
        "kb_per_s": round(rate / 1000, 2),
    }


async def read_events(url: str) -> None:
    """Reads the stream of events that an open tab reads."""
    headers = {"authorization": f"Bearer {TOKEN}"}
    async with (
        httpx.AsyncClient(base_url=url, headers=headers, timeout=30) as http,
        http.stream("GET", "/v1/cluster/events") as response,
    ):
        async for _ in response.aiter_raw():
            pass


async def measure_tabs(server: NatsServer, redis: RedisServer) -> Row:
    """Returns the gateway's CPU while NUM_TABS read the events of a small fleet."""
    with gateway(server, redis) as (url, pid):
        async with Workers(server, FLEETS[0]).running():
            await asyncio.sleep(3.0)
            closed = await share_of_core(pid, SECONDS / 2)
            tabs = [asyncio.create_task(read_events(url)) for _ in range(NUM_TABS)]
            await asyncio.sleep(3.0)
            opened = await share_of_core(pid, SECONDS / 2)
            assert not any(each.done() for each in tabs)
            for each in tabs:
                each.cancel()
            await asyncio.gather(*tabs, return_exceptions=True)
    return {"tabs": NUM_TABS, "gateway_cpu_of_all_tabs": round(opened - closed, 4)}


async def measure_streams(python: Path) -> Row:
    """Returns the gateway's CPU while NUM_STREAMS of the timing engine run beside
    the largest fleet.
    """
    model = ["--model-dir", str(DEMO_MODEL_DIR), "--model-name", DEMO_MODEL_NAME]
    command = ["-m", "services", "gateway", *model]
    with tempfile.TemporaryDirectory() as folder:
        server = NatsServer(Path(folder), users_of(credentials(ONE_WORKER)))
        fleet = Workers(server, FLEETS[-1], model="another", has_scheduler=False)
        options = {"step_s": STEP_S, "nats": server, "commands": {"gateway": command}}
        async with (
            hearth(ONE_WORKER, Path(folder), **options) as (target, processes),
            fleet.running(),
        ):
            streams = asyncio.create_task(run_streams(target))
            await asyncio.sleep(10.0)
            pid, watched = processes["gateway"].pid, f"decode-{FLEETS[-1]}"
            closed = await share_of_core(pid, SECONDS / 2)
            tab = open_tab(python, "cluster", target.url, watched, api_key=target.api_key)
            await figures(tab)
            opened = await share_of_core(pid, SECONDS - 1)
            longest = await figures(tab)
            assert not streams.done(), streams.result()
            fleet.silent.add(watched)
            await figures(tab)
            tab.wait()
            streams.cancel()
            await asyncio.gather(streams, return_exceptions=True)
    return {
        "workers": FLEETS[-1],
        "streams": NUM_STREAMS,
        "gateway_cpu_without_tab": round(closed, 4),
        "gateway_cpu_with_tab": round(opened, 4),
        **longest,
    }


async def run_streams(target: Target) -> Tally:
    """Runs streams until it is cancelled: each stream is longer than the measurement."""
    return await load(
        target,
        itertools.repeat("Go on."),
        concurrency=NUM_STREAMS,
        duration_s=1000 * SECONDS,
        num_output_tokens=int(10 * SECONDS / STEP_S),
        num_events=0,
        kind=ClientKind(),
    )


def users_of(others: Sequence[tuple[CredentialRole, str]]) -> list[NatsUser]:
    """And of the largest fleet."""
    fleet = (NatsUser("decode", f"decode-{n}", PASSWORD, region_of(n)) for n in range(1, 201))
    return [*(NatsUser(role, name, PASSWORD) for role, name in others), *fleet]


async def measure_page(python: Path, server: NatsServer, redis: RedisServer) -> Row:
    found: Row = {}
    with gateway(server, redis) as (url, _):
        async with Workers(server, 1).running():
            for mode in ("paint", "stream"):
                tab = open_tab(python, mode, url)
                found |= await figures(tab)
                tab.wait()
    return {name: round(value, 1) for name, value in found.items()}


async def measure(python: Path) -> None:
    size = sum(len(file.data) for file in read_files().values())
    users = users_of([("gateway", "gateway-1"), ("scheduler", SCHEDULER)])
    with tempfile.TemporaryDirectory() as folder:
        server, redis = NatsServer(Path(folder), users), RedisServer()
        await save_api_key(redis.url, API_KEY, "tenant-1")
        page = await measure_page(python, server, redis)
        rows = [await measure_fleet(python, server, redis, num) for num in FLEETS]
        tabs = await measure_tabs(server, redis)
        server.stop()
        redis.stop()
    busy = await measure_streams(python)
    small, large = rows
    tab_cost = small["gateway_cpu_with_tab"] - small["gateway_cpu_without_tab"]
    bars = [
        at_most("size of the page", size / 1024, 100, "KiB"),
        at_most("first paint on loopback", page["first_paint_ms"], 100, "ms"),
        at_least("frames while 20,000 tokens stream", page["frames_per_s"], 30, "1/s"),
        at_most("an idle tab: CPU of the gateway", tab_cost, 0.01, "cores"),
        at_most("an idle tab: bytes", small["kb_per_s"], 5, "kB/s"),
        at_most("100 tabs: CPU of the gateway", tabs["gateway_cpu_of_all_tabs"], 0.03, "cores"),
        at_most("200 workers: CPU of the gateway", large["gateway_cpu_with_tab"], 0.05, "cores"),
        at_most(
            "200 workers and 500 streams: a tab's CPU of the gateway",
            busy["gateway_cpu_with_tab"] - busy["gateway_cpu_without_tab"],
            0.05,
            "cores",
        ),
        at_most(
            "200 workers and 500 streams: longest task of a tab", busy["longest_task_ms"], 50, "ms"
        ),
        at_most("200 workers: longest task of a tab", large["longest_task_ms"], 50, "ms"),
        at_most(
            "a worker without heartbeats is shown as lost", large["silent_worker_shown_s"], 2, "s"
        ),
    ]
    write_result(
        "page", [{**page, "size_bytes": size}, *rows, tabs, busy], bars, ["-m", "benchmarks.page"]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the gateway's page.")
    parser.add_argument("--python", type=Path, default=PYTHON, help="Python with Playwright")
    asyncio.run(measure(parser.parse_args().python))


if __name__ == "__main__":
    main()

"""D1: two regions up to 300 ms apart; gateway, scheduler and index are in one of them.

Far processes reach NATS through a relay that delays each direction; they use no Redis. KV goes from
the prefill worker to the far decode worker over TCP through a second relay, on an address of its
own: the far worker's unix socket, which is on this host, is removed. Two layouts:

- mixed: a prefill worker here, a decode worker in each region;
- apart: a prefill worker here and a decode worker there, so that every request and its KV cross.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Any, Literal

import psutil

from benchmarks.adversity.cluster import FaultyCluster, cluster
from benchmarks.adversity.load import completion, is_full, print_failures, send_every
from benchmarks.report import Bar, at_least, at_most
from benchmarks.serving.cluster import Process
from shared.subjects import CredentialRole
from tests.support.cluster.clients import Exchange
from tests.support.relay import LOCALHOST, SlowRelay

Layout = Literal["mixed", "apart"]
NUM_REQUESTS, EVERY_S = 20, 0.05
NUM_PUSHED = NUM_REQUESTS // 2
ROUND_TRIPS_MS = (0, 120, 300)
MAX_ROUND_TRIPS = 8
STEP_S = 0.005
PREFILL_APART = {"HEARTH_MAX_LOCAL_PREFILL_TOKENS": "4"}  # by default decode computes short prompts
FAR_HOST = "127.0.0.2"  # the relay's; the far worker listens on 127.0.0.1
WORKERS: Mapping[Layout, Mapping[str, CredentialRole]] = {
    "mixed": {"prefill-here": "prefill", "decode-here": "decode", "decode-there": "decode"},
    "apart": {"prefill-here": "prefill", "decode-there": "decode"},
}


async def measure(rows: Sequence[str]) -> list[Bar]:
    bars: list[Bar] = []
    for layout in WORKERS:
        exchanges = {ms: await _exchanges_at(ms / 1000, layout) for ms in ROUND_TRIPS_MS}
        bars += bars_of(layout, exchanges)
    return bars


def bars_of(layout: Layout, exchanges: Mapping[int, Sequence[Exchange]]) -> list[Bar]:
    """Returns the bars of exchanges by round trip in ms. The exchanges at 0 ms must be among
    them.
    """
    bars = []
    at_once_s = _median_s(exchanges[0])
    for round_trip_ms, given in exchanges.items():
        row = f"D1 {layout}, RTT {round_trip_ms} ms"
        print_failures(row, given)
        bars.append(at_least(f"{row}: answered, of 20", sum(map(is_full, given)), 20, "requests"))
        num_pushed = sum(map(_is_pushed_there, given))
        if layout == "apart":
            bars.append(at_least(f"{row}: KV pushed there", num_pushed, NUM_PUSHED, "prompts"))
        if round_trip_ms:
            most_s = at_once_s + MAX_ROUND_TRIPS * round_trip_ms / 1000
            bars.append(at_most(f"{row}: p50", _median_s(given), most_s, "s"))
    return bars


async def _exchanges_at(round_trip_s: float, layout: Layout) -> list[Exchange]:
    one_way_s = round_trip_s / 2
    names = WORKERS[layout]
    regions = {name: _region(name) for name in names}
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(cluster(names, region="here", regions=regions))
        relay = stack.enter_context(_to(fleet.nats.port, one_way_s))
        gateway = fleet.start_services(PREFILL_APART)
        workers = [_start(fleet, role, name, relay.port) for name, role in names.items()]
        await fleet.ready(gateway, *workers)
        stack.enter_context(_delayed_kv(fleet, workers[-1], one_way_s))
        bodies = [_body(n) for n in range(NUM_REQUESTS)]
        return await send_every(EVERY_S, gateway.url, fleet.api_key, bodies)


def _start(fleet: FaultyCluster, role: CredentialRole, name: str, relay_port: int) -> Process:
    region = _region(name)
    if region == "here":
        return fleet.start_worker(role, name, step_s=STEP_S, options={"region": region})
    folder = fleet.folder / name
    folder.mkdir()
    return fleet.start_worker(
        role,
        name,
        step_s=STEP_S,
        nats_port=relay_port,
        environ={"TMPDIR": str(folder)},  # the folder of its unix socket
        options={"region": region, "data-plane-advertised-host": FAR_HOST},
    )


def _region(name: str) -> str:
    return name.partition("-")[2]


def _delayed_kv(fleet: FaultyCluster, worker: Process, one_way_s: float) -> SlowRelay:
    """Relays the TCP data plane of a worker whose unix socket it removes: peers try that first."""
    for socket_path in Path(fleet.folder / worker.process_id).rglob("kv.sock"):
        socket_path.unlink()
    listening = psutil.Process(worker.popen.pid).net_connections("tcp")
    (port,) = (each.laddr.port for each in listening if each.status == psutil.CONN_LISTEN)
    return _to(port, one_way_s, host=FAR_HOST, port=port)


def _to(server_port: int, one_way_s: float, **options: Any) -> SlowRelay:
    return SlowRelay(lambda: (LOCALHOST, server_port), latency_s=one_way_s, **options)


def _body(number: int) -> dict[str, object]:
    """Returns a body. Every second prompt is long enough for a handoff."""
    return completion(number, num_prompt_tokens=4 + 32 * (number % 2), max_tokens=12)


def _is_pushed_there(exchange: Exchange) -> bool:
    info = exchange.metadata
    return info.get("decode_worker") == "decode-there" and bool(info.get("num_pushed_tokens"))


def _median_s(exchanges: Sequence[Exchange]) -> float:
    return median(each.ended - each.started for each in exchanges)

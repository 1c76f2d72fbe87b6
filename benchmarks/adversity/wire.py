"""Who is on the path, and who holds the credential of another worker.

P2: a whole cluster (`tests/support/services/live_cluster.py`) behind relays that record HTTP, NATS,
Redis and KV: bytes of prompts, KV, keys and passwords in the records, with TLS and AEAD, and
without them. Then the speed of a push with AEAD: a sealed push does the work of a plain one and of
the encryption, so the time of both is expected. All three take turns; the bar is of the median of
the ratios of each turn, because other load on the machine affects the three of a turn alike.

P3: commands with tokens under the hashes of others, commands whose KV would go elsewhere, and
heartbeats that claim another region: kinds of which one was accepted.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.kv_transfer import MIB, POOL_BYTES, Measure, Pool, push_ways
from benchmarks.report import Bar, at_least, at_most
from shared.block_hash import extend_chain, root_hash
from shared.clock import MonotonicClock
from shared.errors import HearthError
from shared.kv_wire.link import FRAMES_UNDER_WAY
from shared.lifecycle.heartbeat import HealthMonitor
from shared.messages import DecodeStarted, PrefillAccepted, StartDecode
from shared.packing import pack_hashes
from shared.randomness import SystemRandomness
from shared.subjects import run_prefill, start_decode
from shared.transport.bus import NatsBus
from shared.transport.server_config import NatsUser
from tests.support.servers import PASSWORD, USERS, NatsServer
from tests.support.services.live_cluster import live_cluster, secrets_of
from tests.support.services.live_workers import (
    BLOCK_SIZE,
    REVISION,
    LiveWorkers,
    live_workers,
    request_of,
    run_prefill_of,
)
from tests.support.services.model_dir import write_model_dir

PUSH_BYTES = (4 * MIB, 64 * MIB)
NUM_REPETITIONS = 11
SEALED_BAR = 0.85  # share of 1 / (1 / plain + 1 / AEAD alone)
PROMPT, OTHER_PROMPT = list(range(100, 149)), list(range(500, 549))
REGIONS = {"decode-1": "eu", "decode-2": "us"}
HEARTBEATS_S = 1.0  # several of each process


async def measure(rows: Sequence[str]) -> list[Bar]:
    bars: list[Bar] = []
    if "P2" in rows:
        bars += await readable_bytes()
        bars += await asyncio.to_thread(sealed_speed)
    if "P3" in rows:
        bars += await forgeries()
    return bars


# ── P2 ───────────────────────────────────────────────────────────────────────────────────────────


async def readable_bytes() -> list[Bar]:
    sealed, plain = await bytes_on_the_path(has_tls=True), await bytes_on_the_path(has_tls=False)
    return [
        at_most("P2: secret bytes on the path, tls:// and AEAD", sealed, 0, "B"),
        at_least("P2: the same search without TLS and AEAD", plain, 1, "B"),
    ]


async def bytes_on_the_path(*, has_tls: bool) -> int:
    """Returns how many bytes of prompts, KV, keys and passwords were readable on all links."""
    with tempfile.TemporaryDirectory(prefix="hearth-wire-") as name:
        folder = Path(name)
        model_dir = write_model_dir(folder / "model")
        security = "aead" if has_tls else "none"
        async with live_cluster(folder, model_dir, has_tls=has_tls, security=security) as cluster:
            secrets = await secrets_of(cluster)
            recorded = b"".join(relay.recorded for relay in cluster.relays.values())
    parts = [part for each in secrets.values() for part in each]
    return sum(len(part) for part in parts if part in recorded)


def sealed_speed() -> list[Bar]:
    bars = []
    with push_ways(FRAMES_UNDER_WAY, Pool(), Pool()) as ways:
        for num_bytes in PUSH_BYTES:
            expected, plain = sealed_ratios(ways, num_bytes)
            size = f"{num_bytes // MIB} MiB"
            name = f"P2: AEAD push / (plain, then AEAD alone), {size}; / plain: {plain:.2f}"
            bars.append(at_least(name, expected, SEALED_BAR, "x"))
    return bars


def sealed_ratios(ways: dict[str, Measure], num_bytes: int) -> tuple[float, float]:
    """Medians of a sealed push's rate over the rate expected, and over that of a plain push."""
    num_transfers = POOL_BYTES // num_bytes
    expected, plain = [], []
    for _ in range(NUM_REPETITIONS + 1):  # the first touches the memory and is dropped
        plain_s, sealed_s, aead_s = (
            ways[name](num_bytes, num_transfers) for name in ("tcp", "tcp_aead", "aead")
        )
        expected.append((plain_s + aead_s) / sealed_s)
        plain.append(plain_s / sealed_s)
    return statistics.median(expected[1:]), statistics.median(plain[1:])


# ── P3 ───────────────────────────────────────────────────────────────────────────────────────────


async def forgeries() -> list[Bar]:
    with tempfile.TemporaryDirectory(prefix="hearth-wire-") as name:
        server = NatsServer(Path(name), USERS)
        try:
            async with live_workers(server, Path(name)) as workers:
                num_hashes = await accepted_hashes(workers)
                num_targets = await accepted_targets(workers)
                is_right = await accepted_prefill(workers, decode_worker_id="decode-1")
                assert is_right, "the right command is not accepted"
        finally:
            server.stop()
        num_regions = await accepted_regions(Path(name))
    kinds = {"hashes": num_hashes, "targets": num_targets, "regions": num_regions}
    found = ", ".join(f"{kind} {count}" for kind, count in kinds.items())
    num_kinds = sum(count > 0 for count in kinds.values())
    return [at_most(f"P3: kinds of forgeries accepted ({found})", num_kinds, 0, "of 3")]


async def accepted_hashes(workers: LiveWorkers) -> int:
    """Returns the tokens under the hashes of other tokens, to prefill and to decode."""
    hashes = pack_hashes(extend_chain(root_hash("tenant-a", REVISION), OTHER_PROMPT, BLOCK_SIZE))
    changes = {"decode_worker_id": "decode-1", "block_hashes": hashes}
    num_accepted = await accepted_prefill(workers, **changes)
    request = msgspec.structs.replace(request_of(PROMPT), block_hashes=hashes)
    start = StartDecode(placement_id=b"s" * 16, request=request, prefill_candidates=("prefill-1",))
    return num_accepted + await is_accepted(
        workers.scheduler, start_decode("decode-1"), start, DecodeStarted
    )


async def accepted_targets(workers: LiveWorkers) -> int:
    """Returns how many targets are accepted: KV for another host, port, unix socket or start
    of the process.
    """
    num_accepted = 0
    for changes in (
        {"host": "10.0.0.7"},
        {"port": workers.data_plane.port + 1},
        {"unix_path": "/tmp/another"},
        {"instance_id": b"another"},
    ):
        address = msgspec.structs.replace(workers.data_plane, **changes)
        targets = (msgspec.structs.replace(workers.targets[0], address=address),)
        num_accepted += await accepted_prefill(
            workers, decode_worker_id="decode-1", targets=targets
        )
    return num_accepted


async def accepted_prefill(workers: LiveWorkers, **changes: object) -> int:
    """Returns 1 if the prefill worker accepts the command with the credential of decode-1."""
    bus = workers.processes["decode-1"]._worker.bus
    command = run_prefill_of(workers, PROMPT, **changes)
    return await is_accepted(bus, run_prefill("prefill-1"), command, PrefillAccepted)


async def is_accepted(bus: Any, subject: str, command: Any, reply_type: type) -> int:
    try:
        await bus.request(subject, command, reply_type, timeout_s=5)
    except HearthError:
        return 0
    return 1


async def accepted_regions(folder: Path) -> int:
    """Returns the workers that others see in `eu`, beyond the one whose credential says so."""
    users = [NatsUser(role, name, PASSWORD, REGIONS.get(name, "")) for role, name in USERS]
    server = NatsServer(folder, users)
    monitors: list[HealthMonitor] = []
    buses: list[NatsBus] = []
    try:
        for process_id in ("scheduler-1", *REGIONS):
            bus = await NatsBus.connect(server.url(process_id), process_id=process_id)
            role = "scheduler" if process_id == "scheduler-1" else "decode"
            region = "" if role == "scheduler" else "eu"
            monitor = HealthMonitor(
                bus, MonotonicClock(), SystemRandomness(), roles=(role,), region=region
            )
            buses.append(bus)
            monitors.append(monitor)
            await monitor.start()
            await monitor.transition_to("ready")
        await asyncio.sleep(HEARTBEATS_S)
        seen = monitors[0].fleet.everyone()
        in_eu = {each.process_id for each in seen if each.region == "eu"}
        assert "decode-1" in in_eu, "the right worker is not seen"
        return len(in_eu - {"decode-1"})
    finally:
        for monitor in monitors:
            await monitor.stop()
        for bus in buses:
            await bus.close()
        server.stop()

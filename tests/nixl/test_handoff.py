"""Handoffs over NIXL between real workers, under faults: `scripts/test --long nixl`.

Workers are on one host, so their unix sockets are hidden as between two hosts. UCX carries the
reads over TCP, or through shared memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.chaos.chaos import Chaos
from tests.chaos.checks.monitor import Monitor
from tests.chaos.checks.phases import Phase
from tests.chaos.frames import relays, run_frames
from tests.chaos.rows import Fault, run_row
from tests.chaos.running import FRAMES_STEP_S, OF_FRAMES, SHORT_CHUNKS, TIMING_STEP_S, WORKERS
from tests.chaos.world.relay import HOST
from tests.chaos.world.spoiling import Spoiling
from tests.support.cluster.chaos_cluster import SERVICES, ChaosCluster
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(find_spec("nixl") is None, reason="the wheel is not installed")

NIXL = {"data-plane-security": "none", "kv-transport": "nixl"}
TRANSPORTS = {"tcp": "tcp", "shared memory": "tcp,posix,sysv,cma,self"}
FAULTS: tuple[tuple[Fault, str, Phase], ...] = (
    ("kill", "prefill-1", "transferring"),
    ("freeze", "prefill-1", "transferring"),
    ("device", "prefill-1", "transferring"),
    ("kill", "prefill-1", "prefilling"),
    ("kill", "decode-1", "transferring"),
    ("freeze", "decode-1", "transferring"),
)


SPOILINGS: tuple[Spoiling, ...] = ("label", "foreign", "twice", "late", "swap", "cut", "noise")


@contextlib.asynccontextmanager
async def running(
    folder: Path,
    transport: str,
    options: dict[str, str],
    services: Iterable[str] = SERVICES,
    step_s: float = TIMING_STEP_S,
) -> AsyncIterator[tuple[ChaosCluster, Monitor]]:
    environ = {"UCX_TLS": TRANSPORTS[transport], "PYTHONPATH": wheel_folder()}
    workers = [name for name in services if name.startswith(("prefill", "decode"))]
    cluster = ChaosCluster(
        folder,
        step_s=step_s,
        worker_options={**WORKERS, **NIXL, **options},
        services=services,
        environ_of=dict.fromkeys(workers, environ),
    )
    monitor = Monitor()
    try:
        await cluster.start()
        await monitor.start(cluster)
        yield cluster, monitor
        await monitor.stop()
    finally:
        cluster.stop()


def wheel_folder() -> str:
    spec = find_spec("nixl")
    assert spec is not None and spec.origin is not None
    return str(Path(spec.origin).parents[1])


async def hide_sockets(cluster: ChaosCluster, monitor: Monitor) -> None:
    names = cluster.named("decode")
    await monitor.wait(lambda: monitor.newest.keys() >= set(names))
    for name in names:
        (target,) = monitor.newest[name].kv_targets
        hide(target.address.unix_path)


def hide(unix_path: str) -> None:
    Path(unix_path).unlink(missing_ok=True)


async def is_used(monitor: Monitor) -> None:
    """Waits until a prefill worker has links over NIXL."""

    def ports() -> set[str]:
        loads = [beat.load for beat in monitor.newest.values() if beat.load is not None]
        return {each.port for load in loads for each in load.kv_links}

    await until(lambda: "nixl" in ports(), seen=lambda: str(ports()))


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_handoffs_over_nixl_lose_and_alter_nothing(tmp_path: Path, transport: str) -> None:
    async with running(tmp_path, transport, {}) as (cluster, monitor):
        await hide_sockets(cluster, monitor)
        chaos = Chaos(cluster, monitor, None)
        await chaos.learn()
        await is_used(monitor)
        for fault, victim, phase in FAULTS:
            row = await run_row(chaos, fault, victim, phase)
            print(f"nixl, {transport}:", row, flush=True)
            assert (row.lost, row.altered) == (0, 0), row
            assert row.whole_after_s is not None, row
            if victim.startswith("decode"):  # it has returned with another socket
                await hide_sockets(cluster, monitor)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_spoilt_frames_are_detected_and_never_served(tmp_path: Path, transport: str) -> None:
    """Their records alone: a relay does not reach the slots."""
    options = {**SHORT_CHUNKS, "data-plane-advertised-host": HOST}
    async with (
        running(tmp_path, transport, options, OF_FRAMES, FRAMES_STEP_S) as (cluster, monitor),
        relays(cluster, monitor, "tcp") as frame_relays,
    ):
        chaos = Chaos(cluster, monitor, None)
        await chaos.learn()
        await is_used(monitor)
        row = await run_frames(chaos, frame_relays, "tcp", *SPOILINGS)
        print(f"nixl, {transport}:", row, flush=True)
    assert (row.lost, row.altered) == (0, 0), row
    assert row.spoilt > 5 and row.found > 5 and not row.missed, row
    assert row.whole_after_s is not None, row

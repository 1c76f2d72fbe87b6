"""A cluster whose logs cannot be written: on a full disk, on a pipe that nobody reads, and on one
whose reader has gone. Workers and NATS die meanwhile; no process stops serving.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.services.unwritable_logs import (
    DEADLINE_S,
    SEEING_SERVICES,
    MutedCluster,
    full_disk,
    stopped_reader,
)
from tests.support.waiting import until

REPLACED = ("decode-1", "decode-2", "kv_index-1", "encode-1", "encode-2")


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[MutedCluster]:
    """Logs of half of the processes are on a full disk, the others' are pipes."""
    has_started = False

    def mute(name: str, log: Path) -> int | None:
        is_on_disk = name.endswith("-1") and name != "kv_index-1"
        return full_disk(log) if is_on_disk or has_started else stopped_reader(log)

    cluster = MutedCluster(tmp_path, mute)
    try:
        await cluster.start()
        has_started = True
        yield cluster
    finally:
        cluster.stop()


async def any_has_encoded(cluster: MutedCluster) -> bool:
    return any([await cluster.has_encoded(each) for each in REPLACED if each.startswith("encode")])


@pytest.mark.long
async def test_every_process_serves_on_while_its_log_cannot_be_written(
    cluster: MutedCluster,
) -> None:
    pids = {name: cluster.pid(name) for name in SEEING_SERVICES}
    first = {await cluster.chat(each) for each in cluster.urls}
    for name in REPLACED:
        assert {*await cluster.replace(name)} == first
        cluster.close_readers()
    cluster.kill("nats-server")
    await asyncio.sleep(0.5)
    await cluster.restart("nats-server")
    await cluster.wait_until_ready(DEADLINE_S)
    assert {await cluster.chat(each) for each in cluster.urls} == first
    await until(lambda: any_has_encoded(cluster), timeout_s=DEADLINE_S)
    for name in pids.keys() - {*REPLACED}:
        assert cluster.pid(name) == pids[name] and cluster._processes[name].poll() is None

"""A gateway and a decode worker of the previous release, replaced under streams."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.client.hearth_nats import HearthClient
from tests.skew.dialects import Asked, all_requests
from tests.skew.fleet import RollingFleet
from tests.skew.releases import WORKING_TREE, CommitMissing, previous_commit, release_of
from tests.skew.streams import Streams

SERVICES = (
    "kv_index-1",
    "scheduler-1",
    "prefill-1",
    "decode-1",
    "decode-2",
    "gateway-1",
    "gateway-2",
)
ROLLED = ("decode-1", "gateway-1")
STEP_S = 0.005
DIALECTS = ("openai", "nats", "responses", "responses at once", "messages", "workers_ai")


async def test_two_processes_are_upgraded_under_streams(tmp_path: Path) -> None:
    new = release_of(WORKING_TREE)
    try:
        old = release_of(previous_commit())
    except CommitMissing as error:
        pytest.skip(str(error))
    fleet = RollingFleet(tmp_path, new, SERVICES, step_s=STEP_S)
    fleet.release_of |= dict.fromkeys(ROLLED, old)
    try:
        await fleet.start()
        nats = await HearthClient.connect(fleet.client_url)
        streams = Streams(fleet, nats, requests=_one_of_each())
        await streams.learn()
        async with streams:
            statuses = [await fleet.replace(name, new) for name in ROLLED]
        num_stored = await streams.read_stored()
        await nats.close()
    finally:
        fleet.stop()
    assert (streams.lost, streams.altered) == ([], [])
    assert statuses == [0, 0]
    assert num_stored
    assert streams.answered.keys() == {*DIALECTS}
    assert any(old.name in pair for pair in streams.pushed), streams.pushed


def _one_of_each() -> list[Asked]:
    by_name = {each.name: each for each in reversed(all_requests())}
    return [by_name[name] for name in DIALECTS]

"""KV frames spoilt in transit between real workers, with all faults at once."""

from __future__ import annotations

import pytest

from tests.chaos.frames import run_frames
from tests.chaos.running import running_frames
from tests.chaos.world.relay import TRANSPORTS, Transport

NUM_STREAMS = 8  # one of each kind; their prompts take enough frames


@pytest.mark.parametrize(
    "transport",
    [pytest.param(each, marks=[pytest.mark.long] if each == "tcp" else []) for each in TRANSPORTS],
)
async def test_spoilt_frames_are_detected_and_never_served(
    tmp_path_factory: pytest.TempPathFactory, transport: Transport
) -> None:
    folder = tmp_path_factory.mktemp("frames")
    async with running_frames(folder, transport, num_streams=NUM_STREAMS) as (
        running,
        frame_relays,
    ):
        row = await run_frames(running, frame_relays, transport)
    assert (row.lost, row.altered) == (0, 0), row
    assert row.spoilt > 5, row
    assert row.found > 5 and not row.missed, row
    assert row.tries_failed > 0, row
    assert row.whole_after_s is not None, row

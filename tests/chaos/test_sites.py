"""Two rows of linked sites; `python -m tests.chaos --sites` runs all. The short run cuts a link in
`tests/services/gateway/sites/test_linked_sites.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.chaos.sites.matrix import STEP_S
from tests.chaos.sites.pair import running_pair
from tests.chaos.sites.picture import flowing
from tests.chaos.sites.rows import run_site_row
from tests.chaos.sites.streams import FarStreams, moved_for_room

HOME = "without room"
NUM_STREAMS, NUM_OUTPUT_TOKENS = 16, 200


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def streams(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FarStreams]:
    async with running_pair(tmp_path_factory.mktemp("sites"), HOME, step_s=STEP_S) as pair:
        found = FarStreams(pair, NUM_STREAMS, NUM_OUTPUT_TOKENS)
        await found.learn()
        yield found


@pytest.mark.long
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("fault", ["link frozen", "b: gateway killed"])
async def test_streams_outlive_a_link_and_a_gateway(streams: FarStreams, fault: str) -> None:
    row = await run_site_row(streams, fault, HOME)
    assert not row.is_bad, row
    assert row.moved > 0, row


@pytest.mark.long
@pytest.mark.asyncio(loop_scope="module")
async def test_streams_without_room_at_home_go_on_at_the_other_site(streams: FarStreams) -> None:
    """Their answers take all blocks of home, where the newest would wait for the end of others."""
    before = await moved_for_room(streams.pair)
    sent, tasks = streams.send_all()
    await asyncio.gather(*tasks)
    assert [each.last.is_successful and streams.is_same(each) for each in sent] == [True] * len(
        sent
    )
    assert await moved_for_room(streams.pair) > before
    pause_s = max(each.longest_pause_s(0.0) for each in sent)
    assert pause_s < NUM_OUTPUT_TOKENS * STEP_S / 2, "no stream waits for another one to end"


def test_picture_has_a_line_while_tokens_come() -> None:
    assert [*flowing([0.0, 0.5, 1.0, 5.0, 5.5])] == [(0.0, 1.0), (5.0, 5.5)]
    assert [*flowing([])] == []

"""Two rows of a host that fails under load; `python -m tests.chaos --hosts` runs all. The short run
kills and freezes a host in `tests/services/host/test_host_process.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.chaos.hosts.rows import HostFault, HostPhase, run_host_row
from tests.chaos.hosts.site import running_site
from tests.chaos.hosts.streams import Streams
from tests.chaos.world.workload import requests

KINDS, NUM_OUTPUT_TOKENS = (1, 3), 150  # with these a row takes seconds

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def streams(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Streams]:
    async with running_site(tmp_path_factory.mktemp("hosts")) as site:
        found = Streams(site, NUM_OUTPUT_TOKENS, [requests()[each] for each in KINDS])
        await found.learn()
        yield found


@pytest.mark.parametrize(
    ("fault", "phase"),
    [("freeze", "parking"), ("kill", "waking")],
)
async def test_streams_outlive_their_host(
    streams: Streams, fault: HostFault, phase: HostPhase
) -> None:
    row = await run_host_row(streams, fault, phase)
    assert not row.is_bad, row
    assert (row.resubmitted > 0) == (fault == "kill"), row

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.chaos.chaos import Chaos
from tests.chaos.running import running_chaos
from tests.chaos.world.workload import NUM_STREAMS


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chaos(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Chaos]:
    """The default services with the timing engine, and their undisturbed responses: a quarter of
    the matrix's load, one request of each kind.
    """
    folder = tmp_path_factory.mktemp("chaos")
    async with running_chaos(folder, num_streams=NUM_STREAMS // 4) as running:
        yield running

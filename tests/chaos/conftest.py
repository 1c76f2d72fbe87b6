from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.chaos.chaos import Chaos
from tests.chaos.running import running_chaos


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chaos(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Chaos]:
    """The default services with the timing engine, and their undisturbed responses."""
    async with running_chaos(tmp_path_factory.mktemp("chaos")) as running:
        yield running

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from shared.background import TASK_FAILED
from tests.support.services.live_cluster import LiveCluster, live_cluster
from tests.support.services.model_dir import write_model_dir


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LiveCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    model = write_model_dir(folder / "tiny")
    async with live_cluster(folder, model, has_tls=False, security="none") as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def ended(cluster: LiveCluster) -> list[object]:
    """The exceptions that would have ended a process, from now on."""
    found: list[object] = []

    def on_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if context["message"] == TASK_FAILED:
            found.append(context["exception"])

    asyncio.get_running_loop().set_exception_handler(on_error)
    return found

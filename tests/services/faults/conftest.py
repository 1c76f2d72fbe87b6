from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from shared.background import TASK_FAILED
from tests.support.services.live_cluster import LiveCluster, live_cluster
from tests.support.services.model_dir import write_model_dir


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[LiveCluster]:
    model = write_model_dir(tmp_path / "tiny")
    async with live_cluster(tmp_path, model, has_tls=False, security="none") as found:
        yield found


@pytest.fixture
async def ended(cluster: LiveCluster) -> list[object]:
    """The exceptions that would have ended a process, from now on."""
    found: list[object] = []

    def on_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if context["message"] == TASK_FAILED:
            found.append(context["exception"])

    asyncio.get_running_loop().set_exception_handler(on_error)
    return found

"""Many chats of one tenant at once: none is refused, whatever waits."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.services.gateway.conftest import Cluster
from tests.services.gateway.dialects.openai.test_chat_http import BODY, CHAT

UNBOUND = httpx.Limits(max_connections=None, max_keepalive_connections=None)
TIMEOUT_S = 120.0


@pytest.mark.parametrize("num_chats", [64, pytest.param(1000, marks=pytest.mark.long)])
async def test_chats_of_one_tenant_wait_for_their_turn(cluster: Cluster, num_chats: int) -> None:
    headers = dict(cluster.http.headers)
    async with httpx.AsyncClient(
        base_url=cluster.http.base_url, headers=headers, limits=UNBOUND, timeout=TIMEOUT_S
    ) as http:
        chats = (http.post(CHAT, json=BODY) for _ in range(num_chats))
        statuses = [each.status_code for each in await asyncio.gather(*chats)]
    assert statuses == [200] * num_chats

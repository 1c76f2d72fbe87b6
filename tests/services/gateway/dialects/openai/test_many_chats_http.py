"""Many chats of one tenant at once: none is refused, whatever waits."""

from __future__ import annotations

import asyncio

from tests.services.gateway.conftest import Cluster
from tests.services.gateway.dialects.openai.test_chat_http import BODY, CHAT

NUM_CHATS = 64


async def test_chats_of_one_tenant_wait_for_their_turn(cluster: Cluster) -> None:
    chats = (cluster.http.post(CHAT, json=BODY) for _ in range(NUM_CHATS))
    statuses = [each.status_code for each in await asyncio.gather(*chats)]
    assert statuses == [200] * NUM_CHATS

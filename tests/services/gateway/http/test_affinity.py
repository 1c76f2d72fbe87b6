"""The session of a request, by its client's own header."""

from __future__ import annotations

from typing import Any

import pytest

from services.gateway.request.generation_request import scoped_affinity_key
from tests.services.gateway.conftest import Cluster
from tests.services.gateway.dialects.openai.test_chat_http import BODY, CHAT

OVERRIDE, BODY_KEY = "x-session-affinity", "prompt_cache_key"
ORDER = (OVERRIDE, BODY_KEY, "session-id", "x-claude-code-session-id", "x-openwebui-chat-id")
RUN = "/client/v4/accounts/tenant-1/ai/run/tiny"


async def key_of(cluster: Cluster, path: str, keys: dict[str, str], body: dict[str, Any]) -> str:
    """The key with which the scheduler got the request that has these keys."""
    headers = {name: key for name, key in keys.items() if name != BODY_KEY}
    fields = {name: key for name, key in keys.items() if name == BODY_KEY}
    response = await cluster.http.post(path, json={**body, **fields}, headers=headers)
    assert response.status_code == 200, response.text
    return cluster.scheduler.submitted[-1].affinity_key


@pytest.mark.parametrize("first", range(len(ORDER)))
async def test_order_of_the_keys(cluster: Cluster, first: int) -> None:
    keys = {name: f"of {name}" for name in ORDER[first:]}
    wanted = scoped_affinity_key("tenant-1", f"of {ORDER[first]}")
    assert await key_of(cluster, CHAT, keys, BODY) == wanted


async def test_long_key_is_cut(cluster: Cluster) -> None:
    keys = [await key_of(cluster, CHAT, {"session-id": "k" * n}, BODY) for n in (256, 257, 9000)]
    assert keys == [scoped_affinity_key("tenant-1", "k" * 256)] * 3


async def test_no_key_without_a_header(cluster: Cluster) -> None:
    assert await key_of(cluster, CHAT, {"session-id": ""}, BODY) == ""

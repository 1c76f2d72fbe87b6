"""What a request held is freed when it ends: a full collection of cycles comes after thousands."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.services.gateway.conftest import API_KEY, Cluster
from tests.services.gateway.dialects.openai.test_chat_http import BODY, CHAT
from tests.support.waiting import until

NUM_REQUESTS = 5


@contextmanager
def cyclic_garbage() -> Iterator[list[object]]:
    """The objects that only a collection frees, of what was made in the block."""
    gc.collect()
    gc.disable()
    garbage: list[object] = []
    try:
        yield garbage
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        garbage += gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def stream(cluster: Cluster, *, leaves_early: bool) -> None:
    reader, writer = await asyncio.open_connection(*cluster.gateway._web_server.address)
    body = json.dumps({**BODY, "stream": True, "max_tokens": 200}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {API_KEY}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await reader.readuntil(b"data:" if leaves_early else b"[DONE]")
    if leaves_early:
        writer.transport.abort()
    writer.close()


@pytest.mark.parametrize("leaves_early", [False, True])
async def test_ended_streams_leave_nothing_to_a_collection(
    cluster: Cluster, leaves_early: bool
) -> None:
    for decode in cluster.decodes:
        decode.answer = decode.answer * (40 if leaves_early else 1)
    state = cluster.gateway._web_server._server.server_state
    before = len(state.connections)  # of other tests' clients, which stay open
    await stream(cluster, leaves_early=leaves_early)  # opens what stays open
    with cyclic_garbage() as garbage:
        for _ in range(NUM_REQUESTS):
            await stream(cluster, leaves_early=leaves_early)
        await until(lambda: not len(cluster.gateway._driver))
        await until(lambda: len(state.connections) <= before and not state.tasks)
    found = {f"{type(each).__module__}.{type(each).__qualname__}" for each in garbage}
    assert {each for each in found if each.startswith(("services.", "uvicorn."))} == set()

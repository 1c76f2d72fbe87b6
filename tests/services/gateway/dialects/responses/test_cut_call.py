"""A response that ends within a call is stored, and the conversation goes on after it."""

from __future__ import annotations

from typing import Any

import pytest

from services.gateway.request import prepared_bodies
from shared.packing import unpack_token_ids
from tests.services.gateway.conftest import Cluster
from tests.services.gateway.dialects.openai.test_tools_http import CALLS, answers, tools_cluster

__all__ = ["tools_cluster"]

pytestmark = pytest.mark.asyncio(loop_scope="session")

PATH = "/v1/responses"
TOOLS: list[dict[str, Any]] = [{"type": "function", "name": "clock"}]


async def created(cluster: Cluster, **fields: Any) -> dict[str, Any]:
    response = await cluster.http.post(PATH, json={"input": "hi", "tools": TOOLS, **fields})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


async def prompt_of(cluster: Cluster) -> str:
    request = (await cluster.scheduler.submits.get()).request
    return cluster.files.tokens.decode(tuple(unpack_token_ids(request.prompt_token_ids)))


@pytest.mark.parametrize("max_inline_bytes", [prepared_bodies.MAX_INLINE_BYTES, 0])
async def test_cut_call_is_continued(
    tools_cluster: Cluster, monkeypatch: pytest.MonkeyPatch, max_inline_bytes: int
) -> None:
    monkeypatch.setattr(prepared_bodies, "MAX_INLINE_BYTES", max_inline_bytes)
    answers(tools_cluster, CALLS)
    encode = tools_cluster.files.tokenizer.encode
    room = len(encode([CALLS[: CALLS.index("zone") + 4]]))
    first = await created(tools_cluster, max_output_tokens=room)
    await prompt_of(tools_cluster)
    assert first["status"] == "incomplete"
    assert first["incomplete_details"] == {"reason": "max_output_tokens"}
    *_, call = first["output"]
    assert (call["type"], call["status"]) == ("function_call", "incomplete")
    assert call["arguments"] == '{"zone'
    answers(tools_cluster, "done")
    second = await created(tools_cluster, input="again", previous_response_id=first["id"])
    assert second["status"] == "completed"
    prompt = await prompt_of(tools_cluster)
    assert "look:" in prompt and "again" in prompt
    bare = {"call_id": call["call_id"], "output": "cut", "type": "function_call_output"}
    third = await created(tools_cluster, input=[bare], previous_response_id=first["id"])
    assert third["status"] == "completed"
    assert "cut" in await prompt_of(tools_cluster)

"""A budget of reasoning for a model that does not mark its reasoning."""

from __future__ import annotations

import pytest

from tests.services.gateway.conftest import Cluster
from tests.services.gateway.dialects.anthropic.stream import MESSAGES
from tests.services.gateway.dialects.openai.test_chat_http import CHAT
from tests.services.gateway.dialects.openai.test_thinking_budget_http import (
    RUN,
    THINKING,
    rejected,
    submitted,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_model_without_markers(cluster: Cluster) -> None:
    """Chats name the field. Messages go on, since clients send a budget to every model."""
    for path in (CHAT, RUN):
        text = await rejected(cluster, path, {"thinking_token_budget": 5})
        assert "thinking_token_budget: this model does not mark its reasoning" in text
    body = {"prompt": "x", "thinking_token_budget": 5}
    response = await cluster.http.post("/v1/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, [*body][1])
    for body in ({"raw": True, "prompt": "x"}, {"text": "x"}):
        response = await cluster.http.post(RUN, json={**body, "thinking_token_budget": 0})
        assert response.status_code == 400 and "thinking_token_budget" in response.text
    assert cluster.scheduler.submits.empty()
    request = await submitted(cluster, MESSAGES, {"thinking": THINKING})
    assert (request.sampling.thinking, request.needs) == (None, ())

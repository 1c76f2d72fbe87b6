"""A budget of reasoning over HTTP: what is submitted for it, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from shared.grammar.thinking import THINKING_FEATURE
from shared.messages import Request
from tests.services.gateway.conftest import Cluster
from tests.services.gateway.dialects.anthropic.stream import MESSAGES
from tests.services.gateway.dialects.openai.test_chat_http import BODY, CHAT
from tests.services.gateway.dialects.openai.test_tools_http import tools_cluster

__all__ = ["tools_cluster"]

pytestmark = pytest.mark.asyncio(loop_scope="session")
RUN = "/client/v4/accounts/tenant-1/ai/run/tiny"
HI = [{"role": "user", "content": "hi"}]
THINKING = {"type": "enabled", "budget_tokens": 5}


async def submitted(cluster: Cluster, path: str, body: dict[str, Any]) -> Request:
    response = await cluster.http.post(path, json={**BODY, "max_tokens": 9, **body})
    assert response.status_code == 200, response.text
    return (await cluster.scheduler.submits.get()).request


async def rejected(cluster: Cluster, path: str, body: dict[str, Any]) -> str:
    response = await cluster.http.post(path, json={"messages": HI, "max_tokens": 9, **body})
    assert response.status_code == 400, response.text
    return response.text


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        (CHAT, {"thinking_token_budget": 5, "n": 2}, 5),
        (CHAT, {"thinking_token_budget": 0, "ignore_eos": True}, 0),
        (CHAT, {"thinking_token_budget": 50}, 50),  # more than max_tokens: never spent
        (MESSAGES, {"thinking": THINKING}, 5),
        (RUN, {"thinking_token_budget": 5}, 5),
    ],
)
async def test_budget_is_submitted_with_the_markers(
    tools_cluster: Cluster, path: str, fields: dict[str, Any], expected: int
) -> None:
    request = await submitted(tools_cluster, path, fields)
    budget = request.sampling.thinking
    assert budget is not None
    assert (budget.max_tokens, budget.is_open) == (expected, False)
    files = tools_cluster.files
    for marks, text in ((budget.opens, "<think>"), (budget.closes, "</think>")):
        assert marks[0] == tuple(files.tokenizer.encode([text]))
        assert all(text in files.tokens.decode(mark) for mark in marks)
    assert request.needs == (THINKING_FEATURE,)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {}),
        (CHAT, {"thinking_token_budget": None}),
        (MESSAGES, {}),
        (MESSAGES, {"thinking": {"type": "adaptive"}}),
        (MESSAGES, {"thinking": {"type": "disabled"}}),
    ],
)
async def test_requests_without_a_budget_need_nothing(
    tools_cluster: Cluster, path: str, fields: dict[str, Any]
) -> None:
    request = await submitted(tools_cluster, path, fields)
    assert (request.sampling.thinking, request.needs) == (None, ())


@pytest.mark.parametrize("value", [-1, 1.5, "5", True, []])
async def test_bad_budget_is_named(tools_cluster: Cluster, value: Any) -> None:
    for path in (CHAT, RUN):
        assert "thinking_token_budget" in await rejected(
            tools_cluster, path, {"thinking_token_budget": value}
        )
    body = {"model": "tiny", "thinking": {"type": "enabled", "budget_tokens": value}}
    assert "thinking.budget_tokens" in await rejected(tools_cluster, MESSAGES, body)
    assert tools_cluster.scheduler.submits.empty()

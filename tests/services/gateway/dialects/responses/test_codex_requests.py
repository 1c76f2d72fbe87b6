"""Two requests of a session in the shape of Codex: the second goes on from the first's prompt."""

from __future__ import annotations

from typing import Any

import pytest

from services.gateway.request.generation_request import GenerationRequest
from services.gateway.request.prompt import ChatPrompt
from tests.clients.agents.codex import (
    AGENT_TOOLS,
    DESCRIPTION_CHARS,
    body_of,
    first_items,
    next_items,
)
from tests.services.gateway.dialects.responses.test_input import generation_of

FUNCTIONS = ("exec_command", *DESCRIPTION_CHARS)


def request_of(items: list[dict[str, Any]]) -> GenerationRequest:
    return generation_of(**body_of(items, "m"))


def prompt_of(request: GenerationRequest) -> ChatPrompt:
    assert isinstance(request.prompt, ChatPrompt)
    return request.prompt


@pytest.mark.parametrize(
    ("names", "flat_name"),
    [
        ({"name": "exec_command"}, "exec_command"),
        ({"name": "wait_agent", "namespace": "multi_agent_v1"}, "multi_agent_v1__wait_agent"),
    ],
)
def test_second_prompt_continues_the_first(names: dict[str, str], flat_name: str) -> None:
    call = {"type": "function_call", "id": "fc_1", "call_id": "c", "arguments": "{}", **names}
    items = first_items("List the files.")
    first, second = request_of(items), request_of(next_items(items, [call], "README.md"))
    before, after = list(prompt_of(first).messages), list(prompt_of(second).messages)
    assert after[: len(before)] == before
    assert [each["role"] for each in after[len(before) :]] == ["assistant", "tool"]
    assert flat_name in str(after[len(before)])
    assert second.tools == first.tools
    assert second.affinity_key == first.affinity_key != ""


def test_offers_all_tools_but_the_hosted_one() -> None:
    tools = request_of(first_items("List the files.")).tools
    assert tools is not None
    names = (*FUNCTIONS, *(f"multi_agent_v1__{each}" for each in AGENT_TOOLS))
    assert tuple(each.name for each in tools.tools) == names

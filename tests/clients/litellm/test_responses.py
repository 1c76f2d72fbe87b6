"""LiteLLM's `responses()`, which sends OpenAI's Responses API."""

from __future__ import annotations

from typing import Any

import litellm
import pytest

from tests.clients.conftest import Reference
from tests.support.account import MODEL, Account

QUESTION = "Where does the phrase Hello, World come from?"


@pytest.fixture
def arguments(account: Account) -> dict[str, Any]:
    return {
        "model": f"openai/{MODEL}",
        "api_base": f"{account.url}/v1",
        "api_key": account.token,
        "input": QUESTION,
        "temperature": 0,
        "max_output_tokens": 32,
    }


@pytest.fixture
def expected(reference: Reference) -> str:
    messages = [{"role": "user", "content": QUESTION}]
    return reference.chat_text(messages, temperature=0, max_tokens=32)


def test_responses(arguments: dict[str, Any], expected: str) -> None:
    response = litellm.responses(**arguments)
    texts = [part.text for item in response.output for part in item.content]
    assert texts == [expected]


def test_responses_stream(arguments: dict[str, Any], expected: str) -> None:
    events = list(litellm.responses(stream=True, **arguments))
    deltas = [each.delta for each in events if each.type == "response.output_text.delta"]
    assert "".join(deltas) == expected
    assert events[-1].type in ("response.completed", "response.incomplete")

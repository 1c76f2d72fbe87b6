"""A picture through Anthropic's SDK, unmodified."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from tests.clients.pictures import (
    BASE64,
    MAX_TOKENS,
    QUESTION,
    SHOWN,
    reference_of_tool,
    reference_text,
    user,
)
from tests.support.account import EYES_MODEL, Account

BLOCK: dict[str, Any] = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": BASE64},
}


@pytest.fixture
def client(seeing_account: Account) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=seeing_account.url, api_key=seeing_account.token)


def answer(client: anthropic.Anthropic, messages: list[Any]) -> anthropic.types.Message:
    return client.messages.create(
        model=EYES_MODEL, max_tokens=MAX_TOKENS, messages=messages, extra_body={"temperature": 0}
    )


def test_a_picture_in_a_message(client: anthropic.Anthropic, seeing_account: Account) -> None:
    found = answer(client, [user(BLOCK)])
    assert found.content[0].text == reference_text(seeing_account, [user(SHOWN)])
    counted = client.messages.count_tokens(model=EYES_MODEL, messages=[user(BLOCK)])
    usage = found.usage
    cached = usage.cache_read_input_tokens or 0
    assert counted.input_tokens == usage.input_tokens + cached > 40


def test_a_picture_in_the_result_of_a_tool(
    client: anthropic.Anthropic, seeing_account: Account
) -> None:
    """As coding agents send screenshots."""
    call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
    content = [BLOCK, {"type": "text", "text": QUESTION}]
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": content}
    messages = [
        user(),
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    assert answer(client, messages).content[0].text == reference_of_tool(seeing_account)


def test_an_address_is_refused(client: anthropic.Anthropic) -> None:
    block = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
    with pytest.raises(anthropic.BadRequestError, match="not fetched from addresses"):
        answer(client, [user(block)])

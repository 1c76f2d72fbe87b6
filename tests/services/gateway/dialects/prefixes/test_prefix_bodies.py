"""Prefixes with tools and calls: they have the prompt of the requests that they are for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from services.gateway.dialects.openai.chat import CHAT_FIELDS, to_generation_request
from services.gateway.dialects.prefixes.bodies import PrefixBody, prompt_of
from services.gateway.dialects.prefixes.prefix_tokenizer import PrefixTokenizer, Tokens
from services.gateway.request.prompt import ChatPrompt
from shared.errors import InvalidRequest
from shared.messages import ModelCard
from shared.tenancy.prefixes.pinned_prefix import PinnedPrefix
from tests.services.gateway.peer import CARD

SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"id": "c", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
HISTORY = [
    {"role": "user", "content": "hi", "name": "ann"},
    {"role": "assistant", "tool_calls": [CALL], "reasoning": "a clock knows"},
    {"role": "tool", "tool_call_id": "c", "content": "12:00"},
]
TOOLS = [{"name": "clock"}, {"type": "custom", "name": "patch"}]


def prefix_prompt(**fields: Any) -> Any:
    return prompt_of(PrefixBody.fields.decode(msgspec.json.encode(fields)))


def test_prefix_has_the_messages_and_tools_of_a_chat() -> None:
    body = {"messages": [SYSTEM, *HISTORY], "tools": TOOLS}
    chat: Any = to_generation_request(CHAT_FIELDS.decode(msgspec.json.encode(body)), "tiny")
    for fields in (body, {"system": SYSTEM["content"], "messages": HISTORY, "tools": TOOLS}):
        prompt = prefix_prompt(**fields)
        assert (prompt.messages, prompt.tools) == (chat.prompt.messages, chat.prompt.tools)


def test_bad_tools_are_rejected() -> None:
    with pytest.raises(InvalidRequest) as caught:
        prefix_prompt(system="x", tools=[{"name": "a b"}])
    assert caught.value.param == "tools[0].name"


async def test_stored_prefix_can_be_rendered_again() -> None:
    """Public prefixes are tokenized again from what is stored."""

    async def tokenize(tenant_id: str, prompts: Sequence[ChatPrompt]) -> Tokens:
        return [list(range(100)) for _ in prompts], ()

    prompt = prefix_prompt(messages=HISTORY, tools=TOOLS)
    prefix = PinnedPrefix(
        name="n",
        tenant_id="t",
        model="tiny",
        messages=[dict(each) for each in prompt.messages],
        tools=[dict(each) for each in prompt.tools],
        created_at=0,
    )
    card: ModelCard = CARD
    stored = await PrefixTokenizer(tokenize, lambda: 1 << 20).read(prefix, card)
    user, *calls_and_results = stored.messages
    assert user == {"role": "user", "content": "hi"}
    assert calls_and_results == list(prompt.messages[1:])
    assert stored.tools == list(prompt.tools)

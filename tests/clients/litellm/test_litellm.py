"""LiteLLM's provider `cloudflare/`, before and since it sends OpenAI's requests to /ai/v1."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import litellm
import openai
import pytest

from tests.clients.conftest import Reference
from tests.support.account import ALIAS, MODEL, TOO_LONG, Account

SENDS_TO_RUN = tuple(map(int, version("litellm").split(".")[:2])) < (1, 91)
MESSAGES = [
    {"role": "system", "content": "You answer briefly."},
    {"role": "user", "content": "Where does the phrase Hello, World come from?"},
]
OPTIONS = {"temperature": 0.8, "seed": 7, "max_tokens": 32}


@pytest.fixture
def arguments(account: Account) -> dict[str, Any]:
    return {
        "model": f"cloudflare/{ALIAS}",
        "api_base": f"{account.ai}/run/",
        "api_key": account.token,
        "messages": MESSAGES,
        "allowed_openai_params": list(OPTIONS),  # of which the older version knows max_tokens
        "max_retries": 0,
        **OPTIONS,
    }


def text_of(response: Any) -> str:
    return response.choices[0].message.content


def delta_of(chunk: Any) -> str:
    return chunk.choices[0].delta.content or ""


def test_completion(arguments: dict[str, Any], reference: Reference) -> None:
    response = litellm.completion(**arguments)
    expected = reference.chat(MESSAGES, **OPTIONS)
    assert text_of(response) == expected["choices"][0]["message"]["content"]
    if not SENDS_TO_RUN:  # which counts tokens with a tokenizer of its own
        assert response.usage.completion_tokens == expected["usage"]["completion_tokens"]


def test_stream(arguments: dict[str, Any], reference: Reference) -> None:
    chunks = list(litellm.completion(stream=True, **arguments))
    assert len(chunks) > 3
    expected = reference.chat(MESSAGES, **OPTIONS)["choices"][0]
    assert "".join(map(delta_of, chunks)) == expected["message"]["content"]
    if not SENDS_TO_RUN:
        assert chunks[-1].choices[0].finish_reason == expected["finish_reason"]


async def test_async_calls(arguments: dict[str, Any], reference: Reference) -> None:
    expected = reference.chat_text(MESSAGES, **OPTIONS)
    assert text_of(await litellm.acompletion(**arguments)) == expected
    stream = await litellm.acompletion(stream=True, **arguments)
    assert "".join([delta_of(each) async for each in stream]) == expected


@pytest.mark.parametrize(
    ("change", "code", "openai_code"),
    [
        ({"model": "cloudflare/@cf/no/such"}, 5007, "model_not_found"),
        ({"api_key": "wrong"}, 10000, "invalid_api_key"),
        ({"temperature": -1}, 5004, "temperature"),
    ],
)
def test_refusal_reaches_the_caller(
    arguments: dict[str, Any], change: dict[str, Any], code: int, openai_code: str
) -> None:
    with pytest.raises(openai.APIError) as refusal:
        litellm.completion(**{**arguments, **change})
    assert (str(code) if SENDS_TO_RUN else openai_code) in str(refusal.value)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_prompt_beyond_the_context_lets_a_fallback_take_over(
    account: Account, is_streamed: bool
) -> None:
    """The proxy's `context_window_fallbacks` wait for this class of error."""
    with pytest.raises(litellm.ContextWindowExceededError, match="maximum context length is"):
        litellm.completion(
            model=f"openai/{MODEL}",
            api_base=f"{account.url}/v1",
            api_key=account.token,
            messages=[{"role": "user", "content": TOO_LONG}],
            stream=is_streamed,
            max_retries=0,
        )

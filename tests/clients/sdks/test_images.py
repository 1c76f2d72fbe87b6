"""A picture through OpenAI's and Cloudflare's SDKs, unmodified: the native API's answer."""

from __future__ import annotations

import cloudflare
import openai
import pytest

from tests.clients.pictures import (
    BASE64,
    MAX_TOKENS,
    QUESTION,
    SHOWN,
    URL,
    looked,
    picture,
    reference_of_tool,
    reference_text,
    user,
)
from tests.support.account import ACCOUNT, EYES_MODEL, Account


@pytest.fixture
def client(seeing_account: Account) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{seeing_account.url}/v1", api_key=seeing_account.token)


@pytest.fixture
def expected(seeing_account: Account) -> str:
    found = reference_text(seeing_account, [user(SHOWN)])
    assert found != reference_text(seeing_account, [user()])
    return found


def test_chat_of_openai(client: openai.OpenAI, expected: str) -> None:
    found = client.chat.completions.create(
        model=EYES_MODEL, messages=[user(SHOWN)], max_tokens=MAX_TOKENS, temperature=0
    )
    assert found.choices[0].message.content == expected
    assert found.usage is not None and found.usage.prompt_tokens > 40


def test_a_stream_of_openai(client: openai.OpenAI, expected: str) -> None:
    chunks = client.chat.completions.create(
        model=EYES_MODEL, messages=[user(SHOWN)], max_tokens=MAX_TOKENS, temperature=0, stream=True
    )
    text = "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
    assert text == expected


def test_responses_of_openai(client: openai.OpenAI, expected: str) -> None:
    shown = {"type": "input_image", "image_url": URL, "detail": "auto"}
    content = [shown, {"type": "input_text", "text": QUESTION}]
    found = client.responses.create(
        model=EYES_MODEL,
        input=[{"role": "user", "content": content}],
        max_output_tokens=MAX_TOKENS,
        temperature=0,
    )
    assert found.output_text == expected


def test_a_chat_of_openai_with_the_result_of_a_tool(
    client: openai.OpenAI, seeing_account: Account
) -> None:
    found = client.chat.completions.create(
        model=EYES_MODEL, messages=looked(SHOWN), max_tokens=MAX_TOKENS, temperature=0
    )
    assert found.choices[0].message.content == reference_of_tool(seeing_account)


def test_responses_of_openai_with_the_output_of_a_function(
    client: openai.OpenAI, seeing_account: Account
) -> None:
    output = [
        {"type": "input_image", "image_url": URL, "detail": "auto"},
        {"type": "input_text", "text": QUESTION},
    ]
    found = client.responses.create(
        model=EYES_MODEL,
        input=[
            {"role": "user", "content": QUESTION},
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": output},
        ],
        max_output_tokens=MAX_TOKENS,
        temperature=0,
    )
    assert found.output_text == reference_of_tool(seeing_account)


def test_an_address_is_refused(client: openai.OpenAI) -> None:
    shown = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    with pytest.raises(openai.BadRequestError, match="not fetched from addresses"):
        client.chat.completions.create(model=EYES_MODEL, messages=[user(shown)])


@pytest.mark.parametrize("image", [BASE64, list(picture())], ids=["base64", "numbers"])
def test_run_of_cloudflare(seeing_account: Account, expected: str, image: str | list[int]) -> None:
    client = cloudflare.Cloudflare(
        base_url=seeing_account.v4, api_token=seeing_account.token, max_retries=0
    )
    found = client.ai.run(
        EYES_MODEL,
        account_id=ACCOUNT,
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=MAX_TOKENS,
        extra_body={"image": image, "temperature": 0},
    )
    assert found["response"] == expected

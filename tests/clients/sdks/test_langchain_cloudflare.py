"""langchain-cloudflare in both of its formats: ai/run and the OpenAI dialect below ai/v1."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from langchain_cloudflare import ChatCloudflareWorkersAI, CloudflareWorkersAIEmbeddings

from tests.clients.conftest import Reference
from tests.support.account import ALIAS, Account

QUESTION = "Where does the phrase Hello, World come from?"
HISTORY = [("system", "You answer briefly."), ("human", QUESTION), ("ai", "C."), ("human", "Why?")]
ROLES = {"system": "system", "human": "user", "ai": "assistant"}
MESSAGES = [{"role": ROLES[role], "content": content} for role, content in HISTORY]
OPTIONS: dict[str, Any] = {"temperature": 0, "max_tokens": 32}
NEARLY_GREEDY = 1e-8  # what the client sends for a temperature of 0


@pytest.fixture(params=["workers_ai", "openai_compatible"])
def model(request: pytest.FixtureRequest, account: Account) -> ChatCloudflareWorkersAI:
    return model_of(account, endpoint_format=request.param)


def model_of(account: Account, **options: Any) -> ChatCloudflareWorkersAI:
    return ChatCloudflareWorkersAI(
        **{"model": ALIAS, "api_token": account.token, **OPTIONS, **options},
        account_id=account.id,
        base_url=account.v4,
    )


@pytest.fixture
def expected(reference: Reference) -> dict[str, Any]:
    return reference.chat(MESSAGES, temperature=NEARLY_GREEDY, max_tokens=32)


def text(expected: dict[str, Any]) -> str:
    return expected["choices"][0]["message"]["content"]


def test_invoke(model: ChatCloudflareWorkersAI, expected: dict[str, Any]) -> None:
    message = model.invoke(HISTORY)
    assert message.content == text(expected)
    assert message.usage_metadata is not None
    for name, native in (("input", "prompt"), ("output", "completion"), ("total", "total")):
        assert message.usage_metadata[f"{name}_tokens"] == expected["usage"][f"{native}_tokens"]


def test_stream(model: ChatCloudflareWorkersAI, expected: dict[str, Any]) -> None:
    chunks = list(model.stream(HISTORY))
    assert len(chunks) > 3
    whole = chunks[0]
    for each in chunks[1:]:
        whole += each
    assert whole.content == text(expected)
    assert whole.response_metadata["model_name"] == ALIAS


def test_usage_of_a_stream_is_counted_once(account: Account, expected: dict[str, Any]) -> None:
    """The client adds the counts of all frames."""
    whole = None
    for each in model_of(account).stream(HISTORY):
        whole = each if whole is None else whole + each
    usage = whole.response_metadata["usage"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[name] == expected["usage"][name]


async def test_async_calls(model: ChatCloudflareWorkersAI, expected: dict[str, Any]) -> None:
    assert (await model.ainvoke(HISTORY)).content == text(expected)
    streamed = [each.content async for each in model.astream(HISTORY)]
    assert "".join(streamed) == text(expected)


def test_every_option_is_taken(account: Account) -> None:
    model = model_of(
        account,
        temperature=0.8,
        top_p=0.9,
        top_k=20,
        frequency_penalty=0.1,
        presence_penalty=0.1,
        repetition_penalty=1.1,
        stop=["no such text"],
        session_id="ses_1",
        reject_if_busy=True,
        model_kwargs={"seed": 7},
    )
    assert model.invoke(HISTORY).content == model.invoke(HISTORY).content


def test_embeddings(account: Account, reference: Reference) -> None:
    client = CloudflareWorkersAIEmbeddings(
        api_base_url=f"{account.v4}/accounts",
        account_id=account.id,
        api_token=account.token,
        model_name=ALIAS,
    )
    texts = [f"text {each}" for each in range(60)]  # the client sends 50 at a time
    expected = reference.embeddings(texts, pooling="mean")
    assert [pytest.approx(each, abs=1e-6) for each in client.embed_documents(texts)] == expected
    assert client.embed_query("text 0") == pytest.approx(expected[0], abs=1e-6)


@pytest.mark.parametrize(
    ("options", "status"), [({"model": "@cf/no/such"}, 400), ({"api_token": "wrong"}, 401)]
)
def test_refusal(account: Account, options: dict[str, Any], status: int) -> None:
    model = model_of(account, **options)
    for call in (model.invoke, lambda history: list(model.stream(history))):
        with pytest.raises(httpx.HTTPStatusError) as refusal:
            call(HISTORY)
        assert refusal.value.response.status_code == status

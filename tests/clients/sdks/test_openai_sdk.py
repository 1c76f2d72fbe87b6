"""OpenAI's SDK against /v1 and against the same below an account of Workers AI.

Pydantic checks every event of a stream: the SDK itself accepts an event with a missing field.
"""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import TypeAdapter

from tests.clients.conftest import Reference
from tests.clients.sdks.events import data_of
from tests.support.account import ALIAS, MODEL, TOO_LONG, Account

MESSAGES = [{"role": "user", "content": "Where does the phrase Hello, World come from?"}]
PROMPT = "Tell me about PEP 8."
OPTIONS = {"temperature": 0.8, "seed": 7, "max_tokens": 32}
CHUNK = TypeAdapter(ChatCompletionChunk)
COMPLETION = TypeAdapter(Completion)


@pytest.fixture(params=[MODEL, ALIAS])
def model(request: pytest.FixtureRequest) -> str:
    """The native name is used with /v1, the alias below an account."""
    return request.param


@pytest.fixture
def client(model: str, account: Account) -> Iterator[openai.OpenAI]:
    url = f"{account.url}/v1" if model == MODEL else f"{account.ai}/v1"
    with openai.OpenAI(base_url=url, api_key=account.token, max_retries=0) as client:
        yield client


def test_chat(client: openai.OpenAI, model: str, reference: Reference) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=model, messages=MESSAGES, **OPTIONS
    )
    answer = ChatCompletion.model_validate_json(raw.content)
    assert answer.choices[0].message.content == reference.chat_text(MESSAGES, **OPTIONS)
    assert answer.usage is not None and answer.usage.completion_tokens > 0


@pytest.mark.parametrize("has_usage", [False, True])
def test_chat_stream(
    client: openai.OpenAI, model: str, reference: Reference, has_usage: bool
) -> None:
    with client.chat.completions.with_streaming_response.create(
        model=model,
        messages=MESSAGES,
        stream=True,
        stream_options={"include_usage": has_usage},
        logprobs=True,
        top_logprobs=2,
        **OPTIONS,
    ) as response:
        chunks = [CHUNK.validate_json(each) for each in data_of(response.iter_lines())]
    choices = [choice for each in chunks for choice in each.choices]
    text = "".join(each.delta.content or "" for each in choices)
    assert text == reference.chat_text(MESSAGES, **OPTIONS)
    assert choices[0].delta.role == "assistant"
    assert [each.finish_reason for each in choices if each.finish_reason] in (["stop"], ["length"])
    assert [each.usage is not None for each in chunks] == [False] * (len(chunks) - 1) + [has_usage]


def test_several_choices_of_a_stream(
    client: openai.OpenAI, model: str, reference: Reference
) -> None:
    stream = client.chat.completions.create(
        model=model, messages=MESSAGES, stream=True, n=3, **OPTIONS
    )
    texts = ["", "", ""]
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    answer = reference.chat(MESSAGES, n=3, **OPTIONS)
    assert texts == [each["message"]["content"] for each in answer["choices"]]
    assert len(set(texts)) == 3


def test_completion(client: openai.OpenAI, model: str, reference: Reference) -> None:
    raw = client.completions.with_raw_response.create(model=model, prompt=PROMPT, **OPTIONS)
    answer = COMPLETION.validate_json(raw.content)
    assert answer.choices[0].text == reference.completion_text(PROMPT, **OPTIONS)


def test_completion_stream(client: openai.OpenAI, model: str, reference: Reference) -> None:
    with client.completions.with_streaming_response.create(
        model=model, prompt=PROMPT, stream=True, **OPTIONS
    ) as response:
        events = data_of(response.iter_lines())
    # The type has `finish_reason` as of a whole completion; events before the last have null.
    answers = [Completion.construct(**TypeAdapter(dict).validate_json(each)) for each in events]
    text = "".join(choice.text for each in answers for choice in each.choices)
    assert text == reference.completion_text(PROMPT, **OPTIONS)


def test_embeddings(client: openai.OpenAI, model: str, reference: Reference) -> None:
    texts = ["a text", "another text"]
    answer = client.embeddings.create(model=model, input=texts)  # base64, which the SDK decodes
    expected = reference.embeddings(texts)
    assert [pytest.approx(each.embedding, abs=1e-6) for each in answer.data] == expected
    raw = client.embeddings.with_raw_response.create(
        model=model, input=texts, encoding_format="float"
    )
    assert CreateEmbeddingResponse.model_validate_json(raw.content).data[1].index == 1


def test_models(client: openai.OpenAI, model: str) -> None:
    listed = {each.id: Model.model_validate(each.to_dict()) for each in client.models.list()}
    assert {MODEL, model} <= listed.keys()
    assert client.models.retrieve(model).id == model


def test_errors_are_exceptions_by_status(client: openai.OpenAI, model: str) -> None:
    create = client.chat.completions.create
    with pytest.raises(openai.NotFoundError) as not_found:
        create(model="@cf/no/such", messages=MESSAGES)
    assert not_found.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as invalid:
        create(model=model, messages=MESSAGES, temperature=-1)
    assert invalid.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="maximum context length is") as too_long:
        create(model=model, messages=[{"role": "user", "content": TOO_LONG}])
    assert too_long.value.code == "context_length_exceeded"
    stranger = client.with_options(api_key="wrong")
    with pytest.raises(openai.AuthenticationError):
        stranger.chat.completions.create(model=model, messages=MESSAGES)


async def test_async_stream(account: Account, reference: Reference) -> None:
    async with openai.AsyncOpenAI(base_url=f"{account.ai}/v1", api_key=account.token) as client:
        stream = await client.chat.completions.create(
            model=ALIAS, messages=MESSAGES, stream=True, **OPTIONS
        )
        text = "".join([each.choices[0].delta.content or "" async for each in stream])
    assert text == reference.chat_text(MESSAGES, **OPTIONS)

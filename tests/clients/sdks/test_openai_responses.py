"""The Responses API of OpenAI's SDK; Pydantic checks every event, which the SDK itself does not."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from tests.clients.conftest import Reference
from tests.support.account import ALIAS, MODEL, Account

QUESTION = "Where does the phrase Hello, World come from?"
OPTIONS = {"temperature": 0.8, "extra_body": {"seed": 7}}
REFERENCE = {"temperature": 0.8, "seed": 7, "max_tokens": 32}
EVENT = TypeAdapter(ResponseStreamEvent)


class Answer(BaseModel):
    is_true: bool


@pytest.fixture(params=[MODEL, ALIAS])
def model(request: pytest.FixtureRequest) -> str:
    """The native name is used with /v1, the alias below an account."""
    return request.param


@pytest.fixture
def client(model: str, account: Account) -> Iterator[openai.OpenAI]:
    url = f"{account.url}/v1" if model == MODEL else f"{account.ai}/v1"
    with openai.OpenAI(base_url=url, api_key=account.token, max_retries=0) as client:
        yield client


def test_create(client: openai.OpenAI, model: str, reference: Reference) -> None:
    raw = client.responses.with_raw_response.create(
        model=model, input=QUESTION, max_output_tokens=32, **OPTIONS
    )
    response = Response.model_validate_json(raw.content)
    expected = reference.chat_text([{"role": "user", "content": QUESTION}], **REFERENCE)
    assert response.output_text == expected
    assert response.usage is not None and response.usage.output_tokens > 0


def test_raw_stream(client: openai.OpenAI, model: str, reference: Reference) -> None:
    with client.responses.with_streaming_response.create(
        model=model, input=QUESTION, max_output_tokens=32, stream=True, **OPTIONS
    ) as response:
        lines = [each for each in response.iter_lines() if each.startswith("data: ")]
    events = [EVENT.validate_json(each.removeprefix("data: ")) for each in lines]
    assert [each.sequence_number for each in events] == list(range(len(events)))
    text = "".join(each.delta for each in events if each.type == "response.output_text.delta")
    expected = reference.chat_text([{"role": "user", "content": QUESTION}], **REFERENCE)
    assert text == expected == events[-1].response.output_text


def test_stream(client: openai.OpenAI, model: str) -> None:
    with client.responses.stream(model=model, input=QUESTION, **OPTIONS) as stream:
        text = "".join(each.delta for each in stream if each.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text != ""


def test_parse(client: openai.OpenAI, model: str) -> None:
    parsed = client.responses.parse(model=model, input=QUESTION, text_format=Answer)
    assert isinstance(parsed.output_parsed, Answer)


def test_stored_response(client: openai.OpenAI, model: str) -> None:
    first = client.responses.create(model=model, input=QUESTION, max_output_tokens=8, store=True)
    assert client.responses.retrieve(first.id).output_text == first.output_text
    second = client.responses.create(
        model=model, input="And then?", previous_response_id=first.id, max_output_tokens=8
    )
    assert second.previous_response_id == first.id
    assert second.usage is not None and first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    (item,) = client.responses.input_items.list(first.id)
    assert json.loads(item.to_json())["content"][0]["text"] == QUESTION
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_input_tokens(client: openai.OpenAI, model: str) -> None:
    counted = client.responses.input_tokens.count(model=model, input=QUESTION)
    response = client.responses.create(model=model, input=QUESTION, max_output_tokens=1)
    assert response.usage is not None and counted.input_tokens == response.usage.input_tokens


def test_errors_are_exceptions_by_status(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as invalid:
        client.responses.create(model=model, input=QUESTION, background=True)
    assert invalid.value.param == "background"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="@cf/no/such", input=QUESTION)


def test_long_chain_is_read_from_the_cache(account: Account) -> None:
    previous = None
    with openai.OpenAI(base_url=f"{account.url}/v1", api_key=account.token) as client:
        for number in range(50):
            last = client.responses.create(
                model=MODEL,
                input=f"Turn {number}: what comes after this?",
                previous_response_id=previous,
                max_output_tokens=8,
            )
            previous = last.id
    assert last.usage is not None
    assert last.usage.input_tokens_details.cached_tokens >= 0.95 * last.usage.input_tokens

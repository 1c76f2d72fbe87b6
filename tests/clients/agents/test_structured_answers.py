"""Clients that demand objects of a class: OpenAI's SDK, LangChain, Instructor."""

from __future__ import annotations

import enum

import instructor
import openai
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

from tests.support.account import AGENT_MODEL, Account

MESSAGES = [{"role": "user", "content": "Describe a server with a GPU."}]
MAX_TOKENS = 400


class Level(enum.StrEnum):
    LOW = "low"
    HIGH = "high"


class Part(BaseModel):
    level: Level
    count: int = Field(ge=1, le=9)


class Server(BaseModel):
    is_ready: bool
    parts: list[Part] = Field(min_length=1, max_length=2)


class Disk(BaseModel):  # without an enum: Instructor refuses its values in partial objects
    name: str
    sizes: list[int] = Field(min_length=2, max_length=3)


def openai_client(account: Account) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{account.url}/v1", api_key=account.token, max_retries=0)


def test_openai_parse(account: Account) -> None:
    with openai_client(account) as client:
        answer = client.chat.completions.parse(
            model=AGENT_MODEL, messages=MESSAGES, response_format=Server, max_tokens=MAX_TOKENS
        )
    assert isinstance(answer.choices[0].message.parsed, Server)


def test_openai_stream(account: Account) -> None:
    with (
        openai_client(account) as client,
        client.chat.completions.stream(
            model=AGENT_MODEL, messages=MESSAGES, response_format=Server, max_tokens=MAX_TOKENS
        ) as stream,
    ):
        kinds = {event.type for event in stream}
        answer = stream.get_final_completion()
    assert {"content.delta", "content.done"} <= kinds
    assert isinstance(answer.choices[0].message.parsed, Server)


def test_langchain(account: Account) -> None:
    model = ChatOpenAI(
        model=AGENT_MODEL,
        base_url=f"{account.url}/v1",
        api_key=account.token,
        max_tokens=MAX_TOKENS,
    )
    for method in ("json_schema", "function_calling"):
        parsed = model.with_structured_output(Server, method=method).invoke("Describe a server.")
        assert isinstance(parsed, Server), method


def test_instructor(account: Account) -> None:
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
        with openai_client(account) as plain:
            client = instructor.from_openai(plain, mode=mode)
            parsed = client.chat.completions.create(
                model=AGENT_MODEL,
                messages=MESSAGES,
                response_model=Server,
                max_tokens=MAX_TOKENS,
                max_retries=0,
            )
        assert isinstance(parsed, Server), mode


def test_instructor_streams_partial_objects(account: Account) -> None:
    with openai_client(account) as plain:
        client = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
        *_, last = client.chat.completions.create_partial(
            model=AGENT_MODEL, messages=MESSAGES, response_model=Disk, max_tokens=MAX_TOKENS
        )
    assert Disk.model_validate(last.model_dump())


def test_langchain_streams_calls(account: Account) -> None:
    model = ChatOpenAI(
        model=AGENT_MODEL, base_url=f"{account.url}/v1", api_key=account.token, temperature=0
    )
    for strict in (None, True):
        bound = model.bind_tools([Server], tool_choice="Server", strict=strict)
        chunks = list(bound.stream("Describe a server."))
        assert any(each.tool_call_chunks for each in chunks)
        whole = chunks[0]
        for each in chunks[1:]:
            whole += each
        [call] = whole.tool_calls
        assert call["name"] == "Server" and Server.model_validate(call["args"])
        assert whole.response_metadata["finish_reason"] == "tool_calls"

"""LangChain's ChatAnthropic, whole and streamed, with tools."""

from __future__ import annotations

import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool

from tests.support.account import AGENT_MODEL, MODEL, Account

MESSAGES = [SystemMessage("You answer briefly."), HumanMessage("What is PEP 8?")]


@tool
def clock(zone: str) -> str:
    """Tells the time."""
    return "9"


def chat(account: Account, model: str) -> ChatAnthropic:
    return ChatAnthropic(
        model_name=model,
        base_url=account.url,
        api_key=account.token,
        max_tokens=64,
        temperature=0,
        max_retries=0,
    )


@pytest.fixture
def model(account: Account) -> ChatAnthropic:
    return chat(account, MODEL)


def test_invoke_and_stream(model: ChatAnthropic) -> None:
    whole = model.invoke(MESSAGES)
    parts = list(model.stream(MESSAGES))
    assert whole.content and "".join(each.text for each in parts) == whole.text
    usage = whole.usage_metadata
    assert usage is not None and usage["output_tokens"] > 0
    assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"]


async def test_async_calls(model: ChatAnthropic) -> None:
    whole = await model.ainvoke(MESSAGES)
    assert "".join([each.text async for each in model.astream(MESSAGES)]) == whole.text


@pytest.mark.parametrize("is_stream", [False, True])
def test_tools(agents: Account, is_stream: bool) -> None:
    model = chat(agents, AGENT_MODEL).bind_tools([clock])
    question = HumanMessage("What time is it in Oslo?")
    if is_stream:
        answer, *parts = model.stream([question])
        for part in parts:
            answer += part
    else:
        answer = model.invoke([question])
    [call] = answer.tool_calls
    assert call["name"] == "clock" and call["args"].keys() == {"zone"}
    result = ToolMessage(clock.invoke(call["args"]), tool_call_id=call["id"])
    assert model.invoke([question, answer, result]).text

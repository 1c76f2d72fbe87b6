"""Agents that call a tool and answer with its result, as their frameworks run them."""

from __future__ import annotations

from typing import Any

import agents
import openai
import pytest
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.support.account import AGENT_MODEL, Account

QUESTION = "What time is it in Berlin?"
TIME = "12:34"
ANSWER = "The tool has answered."  # of the checkpoint, after each result


class Hour(BaseModel):
    zone: str
    hour: int


@pytest.mark.parametrize(
    "model_type", [agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel]
)
async def test_openai_agents(account: Account, model_type: Any) -> None:
    zones = []

    @agents.function_tool
    def clock(zone: str) -> str:
        """The time in a zone."""
        zones.append(zone)
        return TIME

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{account.url}/v1", api_key=account.token)
    model = model_type(model=AGENT_MODEL, openai_client=client)
    agent = agents.Agent(name="clerk", instructions="Be brief.", model=model, tools=[clock])
    result = await agents.Runner.run(agent, QUESTION)
    assert result.final_output == ANSWER and len(zones) == 1
    streamed = agents.Runner.run_streamed(agent, QUESTION)
    events = [event.type async for event in streamed.stream_events()]
    assert "run_item_stream_event" in events
    assert streamed.final_output == ANSWER and len(zones) == 2


@pytest.mark.parametrize("model_type", [OpenAIChatModel, OpenAIResponsesModel])
async def test_pydantic_ai(account: Account, model_type: Any) -> None:
    provider = OpenAIProvider(base_url=f"{account.url}/v1", api_key=account.token)
    agent = Agent(model_type(AGENT_MODEL, provider=provider))
    zones = []

    @agent.tool_plain
    def clock(zone: str) -> str:
        """The time in a zone."""
        zones.append(zone)
        return TIME

    result = await agent.run(QUESTION)
    assert result.output == ANSWER and len(zones) == 1
    async with agent.run_stream(QUESTION) as streamed:
        assert await streamed.get_output() == ANSWER
    assert len(zones) == 2


@pytest.mark.parametrize("model_type", [OpenAIChatModel, OpenAIResponsesModel])
async def test_pydantic_ai_objects(account: Account, model_type: Any) -> None:
    provider = OpenAIProvider(base_url=f"{account.url}/v1", api_key=account.token)
    for output in (NativeOutput(Hour), ToolOutput(Hour)):
        agent = Agent(model_type(AGENT_MODEL, provider=provider), output_type=output)
        assert isinstance((await agent.run(QUESTION)).output, Hour)


@pytest.mark.parametrize(
    "model_type", [agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel]
)
async def test_openai_agents_objects(account: Account, model_type: Any) -> None:
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{account.url}/v1", api_key=account.token)
    model = model_type(model=AGENT_MODEL, openai_client=client)
    agent = agents.Agent(name="clerk", model=model, output_type=Hour)
    assert isinstance((await agents.Runner.run(agent, QUESTION)).final_output, Hour)


@pytest.mark.filterwarnings("ignore:create_react_agent has been moved")
def test_langgraph(account: Account) -> None:
    zones = []

    @tool
    def clock(zone: str) -> str:
        """The time in a zone."""
        zones.append(zone)
        return TIME

    model = ChatOpenAI(model=AGENT_MODEL, base_url=f"{account.url}/v1", api_key=account.token)
    agent = create_react_agent(model, [clock])
    messages = agent.invoke({"messages": [("user", QUESTION)]})["messages"]
    assert [each.type for each in messages] == ["human", "ai", "tool", "ai"]
    assert messages[2].content == TIME and messages[3].content == ANSWER and len(zones) == 1
    going_on = {"messages": [*messages, ("user", QUESTION)]}
    steps = list(agent.stream(going_on, stream_mode="updates"))
    assert [key for step in steps for key in step] == ["agent", "tools", "agent"]
    assert len(zones) == 2

"""Agents that call a tool and answer with its result, as their frameworks run them."""

from __future__ import annotations

import agents
import openai
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.account import AGENT_MODEL, Account

QUESTION = "What time is it in Berlin?"
TIME = "12:34"
ANSWER = "The tool has answered."  # of the checkpoint, after each result


async def test_openai_agents(account: Account) -> None:
    zones = []

    @agents.function_tool
    def clock(zone: str) -> str:
        """The time in a zone."""
        zones.append(zone)
        return TIME

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{account.url}/v1", api_key=account.token)
    model = agents.OpenAIChatCompletionsModel(model=AGENT_MODEL, openai_client=client)
    agent = agents.Agent(name="clerk", instructions="Be brief.", model=model, tools=[clock])
    result = await agents.Runner.run(agent, QUESTION)
    assert result.final_output == ANSWER and len(zones) == 1
    streamed = agents.Runner.run_streamed(agent, QUESTION)
    events = [event.type async for event in streamed.stream_events()]
    assert "run_item_stream_event" in events
    assert streamed.final_output == ANSWER and len(zones) == 2


async def test_pydantic_ai(account: Account) -> None:
    provider = OpenAIProvider(base_url=f"{account.url}/v1", api_key=account.token)
    agent = Agent(OpenAIChatModel(AGENT_MODEL, provider=provider))
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

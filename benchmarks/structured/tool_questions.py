"""Held-out questions to the demo model, for which it has to call one of four tools, or none.

`scripts/demo_corpus/held_out_tools.toml`: questions whose wordings the corpus does not have. Names
are the model's own choice; arguments are always valid, since a grammar constrains them.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.report import Bar, Row, at_least
from benchmarks.structured.cluster import Served, at_most_at_once, served
from services.cli.service_options import DEMO_MODEL_DIR
from tests.corpora.documents import is_valid

QUESTIONS = Path(__file__).resolve().parents[2] / "scripts/demo_corpus/held_out_tools.toml"
NUM_AT_ONCE = 8
MAX_TOKENS = 200
MIN_RIGHT = 0.9


class ToolQuestion(msgspec.Struct, frozen=True):
    """`call`: the right tool's name; empty: none of them. `arguments`: the right ones, if known."""

    question: str
    tools: list[dict[str, Any]]
    call: str = ""
    arguments: dict[str, Any] | None = None


async def measure() -> tuple[list[Row], list[Bar]]:
    given = tomllib.loads(QUESTIONS.read_text())["question"]
    questions = msgspec.convert(given, list[ToolQuestion])
    counts: Counter[str] = Counter()
    async with served(DEMO_MODEL_DIR) as target:

        async def one(question: ToolQuestion) -> None:
            await _count(target, question, counts)

        await at_most_at_once(NUM_AT_ONCE, questions, one)
    num_calls = max(1, counts["calls"])
    row = {
        "case": "tool questions",
        "questions": len(questions),
        "right": counts["right"] / len(questions),
        "calls": counts["calls"],
        "valid arguments": counts["valid"] / num_calls,
        "right arguments": counts["right arguments"] / num_calls,
    }
    return [row], [
        at_least("right tool, or rightly none", row["right"], MIN_RIGHT, ""),
        at_least("calls with valid arguments", row["valid arguments"], 1.0, ""),
    ]


async def _count(target: Served, question: ToolQuestion, counts: Counter[str]) -> None:
    tools = [{"type": "function", "function": tool} for tool in question.tools]
    messages = [{"role": "user", "content": question.question}]
    answer = await target.ask(target.chat(messages=messages, tools=tools, max_tokens=MAX_TOKENS))
    if answer.status != 200:
        raise ValueError(f"{question.question}: {answer.status} {answer.text}")
    calls = [each["function"] for each in answer.message.get("tool_calls") or ()]
    names = {each["name"] for each in calls}
    counts["right"] += names == ({question.call} if question.call else set())
    schemas = {tool["name"]: tool["parameters"] for tool in question.tools}
    for call in calls:
        counts["calls"] += 1
        counts["valid"] += is_valid(call["arguments"], schemas.get(call["name"], False))
        arguments = msgspec.json.decode(call["arguments"])
        counts["right arguments"] += question.arguments in (None, arguments)

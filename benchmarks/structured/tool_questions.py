"""Held-out questions to the demo model, for which it has to call one of four tools, or none.

The questions are those on which training scores a checkpoint (`scripts/demo_training`), which no
training has seen. Names are the model's own choice; arguments are always valid, since a grammar
constrains them.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.report import Bar, Row, at_least
from benchmarks.structured.cluster import Served, at_most_at_once, served
from services.cli.cluster.service_options import DEMO_MODEL_DIR
from tests.support.corpora.documents import is_valid

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"  # not a package: they run by path
NUM_AT_ONCE = 8
MAX_TOKENS = 200
MIN_RIGHT = 0.9


class ToolQuestion(msgspec.Struct, frozen=True):
    """A question with tools. `calls` are the expected calls, `{"name": …, "arguments": {…}}`;
    empty: none.
    """

    question: str
    tools: list[dict[str, Any]]
    calls: list[dict[str, Any]]


def held_out_questions() -> list[ToolQuestion]:
    sys.path.insert(0, str(SCRIPTS))
    cases = importlib.import_module("demo_training.tool_cases")
    dialogues = importlib.import_module("demo_training.tool_dialogues")
    folder = SCRIPTS / "demo_corpus"
    return [
        ToolQuestion(case.question, case.schemas(), list(map(msgspec.json.decode, case.calls)))
        for case in cases.held_out_cases(folder, dialogues.load_tools(folder))
    ]


async def measure() -> tuple[list[Row], list[Bar]]:
    questions = held_out_questions()
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
    messages = [{"role": "user", "content": question.question}]
    body = target.chat(messages=messages, tools=question.tools, max_tokens=MAX_TOKENS)
    answer = await target.ask(body)
    if answer.status != 200:
        raise ValueError(f"{question.question}: {answer.status} {answer.text}")
    calls = [each["function"] for each in answer.message.get("tool_calls") or ()]
    expected = [each["name"] for each in question.calls]
    counts["right"] += [each["name"] for each in calls] == expected
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in question.tools}
    for index, call in enumerate(calls):
        counts["calls"] += 1
        counts["valid"] += is_valid(call["arguments"], schemas.get(call["name"], False))
        arguments = msgspec.json.decode(call["arguments"])
        right = [each["arguments"] for each in question.calls][index : index + 1]
        counts["right arguments"] += right == [arguments]

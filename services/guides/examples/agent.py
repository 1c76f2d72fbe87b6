"""Answers a question with two functions that the model may call.

    python agent.py MODEL QUESTION

The server enforces the schemas: arguments need no check of their own. Each turn goes on from the
KV of the one before.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import openai

MAX_TURNS = 5


def multiply(a: float, b: float) -> str:
    return f"{a * b:g}"


def weekday(date: str) -> str:
    try:
        return datetime.date.fromisoformat(date).strftime("%A")
    except ValueError as error:
        return f"error: {error}"  # the model reads it, and may try again


def tool(
    function: Callable[..., str], description: str, **properties: dict[str, Any]
) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    described = {"name": function.__name__, "description": description, "parameters": schema}
    return {"type": "function", "function": {**described, "strict": True}}


FUNCTIONS: dict[str, Callable[..., str]] = {"multiply": multiply, "weekday": weekday}
NUMBER = {"type": "number", "minimum": -1e6, "maximum": 1e6, "multipleOf": 0.01}
TOOLS: list[Any] = [
    tool(multiply, "Multiplies two numbers.", a=NUMBER, b=NUMBER),
    tool(
        weekday,
        "Tells the day of the week of a date.",
        date={"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"},
    ),
]


def main(model: str, question: str, first_choice: Any = "auto") -> None:
    """Answers. With `required` as `first_choice` the first turn is a call in any case."""
    url, key = os.environ["HEARTH_URL"], os.environ["HEARTH_API_KEY"]
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key)
    messages: list[Any] = [{"role": "user", "content": question}]
    for turn in range(MAX_TURNS):
        answer = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=TOOLS,
            tool_choice=first_choice if turn == 0 else "auto",
            max_tokens=200,
        )
        message: Any = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            print(message.content)
            return
        for call in message.tool_calls:
            arguments = json.loads(call.function.arguments)
            result = FUNCTIONS[call.function.name](**arguments)
            print(f"{call.function.name}({arguments}) = {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    sys.exit(f"no answer after {MAX_TURNS} turns")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])

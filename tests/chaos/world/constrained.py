"""Requests whose output a grammar constrains, and whether an output is what they demand.

A grammar's position is state of the decode worker: another one must restore it from the tokens.
"""

from __future__ import annotations

import random
import re
from typing import Any

from services.cli.cluster.service_options import DEMO_MODEL_NAME
from tests.chaos.world.workload import NUM_STREAMS, Body
from tests.support.cluster.clients import ChoiceOutput
from tests.support.corpora.documents import is_valid

MAX_TOKENS = 600  # of which no output needs all
NUM_ITEMS = range(24, 40)
LINE = "[a-z]{3}=[0-9]{2};"


def constrained_requests(
    count: int = NUM_STREAMS, *, has_tools: bool = True
) -> list[tuple[str, Body]]:
    """(path, body); the same in every run. `has_tools`: the model calls tools."""
    return [_request(index, has_tools=has_tools) for index in range(count)]


def is_as_demanded(body: Body, output: dict[int, ChoiceOutput]) -> bool:
    """Whether each choice ended by itself in what the grammar of `body` describes."""
    expected_reason = "tool_calls" if "tools" in body else "stop"
    return all(
        each.finish_reasons == [expected_reason] and _matches(body, each)
        for each in output.values()
    ) and len(output) == body.get("n", 1)


def _matches(body: Body, output: ChoiceOutput) -> bool:
    if "tools" in body:
        (tool,) = body["tools"]
        return len(output.calls) == 1 and all(
            name == tool["function"]["name"] and is_valid(arguments, tool["function"]["parameters"])
            for name, arguments in output.calls.values()
        )
    if "guided_regex" in body:
        return re.fullmatch(body["guided_regex"], output.text) is not None
    if "guided_grammar" in body:
        return re.fullmatch(f"({LINE}\n)+end", output.text) is not None
    if "guided_json" in body:
        return is_valid(output.text, body["guided_json"])
    schema = body["response_format"]["json_schema"]["schema"]
    return is_valid(output.text, schema)


def _request(index: int, *, has_tools: bool) -> tuple[str, Body]:
    rng = random.Random(f"constrained {index}")
    is_chat = index % 2 == 1
    words = " ".join(rng.choice(("worker", "token", "lease")) for _ in range(rng.randint(40, 150)))
    body: Body = {
        "model": DEMO_MODEL_NAME,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
    }
    body |= {"messages": [{"role": "user", "content": words}]} if is_chat else {"prompt": words}
    body |= _constraint(index % 8, rng, has_tools=has_tools)
    return ("/v1/chat/completions" if is_chat else "/v1/completions"), body


def _constraint(kind: int, rng: random.Random, *, has_tools: bool) -> Body:
    """Even kinds are completions, odd ones are chats."""
    count = rng.choice(NUM_ITEMS)
    seeded = {"temperature": 0.9, "seed": rng.randrange(1 << 31)}
    schema = _list_schema(count)
    strict = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    lines = f'start: line{{{count}}} "end"\nline: /{LINE}/ "\\n"'
    tool = {"type": "function", "function": {"name": "clock", "parameters": _members_schema(count)}}
    calls: Body = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    return {
        0: {"guided_regex": f"({LINE}){{{count}}}"},
        1: {"response_format": strict},
        2: {"guided_json": schema} | seeded,
        3: {"response_format": strict, "n": 3} | seeded,
        4: {"guided_grammar": lines},
        5: {"response_format": strict, "logprobs": True, "top_logprobs": 2} | seeded,
        6: {"guided_regex": f"({LINE}){{{count}}}", "n": 2, "logprobs": 2} | seeded,
        7: (calls if has_tools else {"guided_json": schema}) | seeded,
    }[kind]


def _list_schema(count: int) -> dict[str, Any]:
    members = {"name": {"type": "string", "maxLength": 8}, "size": {"enum": [1, 2, 3]}}
    closed = {"required": [*members], "additionalProperties": False}
    item = {"type": "object", "properties": members, **closed}
    return {"type": "array", "items": item, "minItems": count // 2, "maxItems": count // 2}


def _members_schema(count: int) -> dict[str, Any]:
    members = {
        f"member_{n}": {"type": "integer", "minimum": 0, "maximum": 99} for n in range(count)
    }
    return {
        "type": "object",
        "properties": members,
        "required": [*members],
        "additionalProperties": False,
    }

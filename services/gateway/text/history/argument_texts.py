"""Quotes arguments of earlier calls for templates that write them between XML tags.

Such a template writes a string as it is. Where that would be read as another value, the string is
given to it in quotes, as the model writes it: `schemas/argument_text.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from services.gateway.schemas.argument_text import ArgumentKinds, written

Messages = Sequence[Mapping[str, Any]]


def with_argument_texts(messages: Messages, tools: Messages) -> Messages:
    """Quotes strings that would be read as other values. `tools`: in the form for templates. Calls
    of other tools stay as they are.
    """
    functions = [each["function"] for each in tools]
    kinds = {each["name"]: ArgumentKinds(each["parameters"]) for each in functions}
    return [_with_texts(each, kinds) if each.get("tool_calls") else each for each in messages]


def _with_texts(message: Mapping[str, Any], kinds: Mapping[str, ArgumentKinds]) -> dict[str, Any]:
    calls = [
        {**call, "function": _function(call["function"], kinds[call["function"]["name"]])}
        if call["function"]["name"] in kinds
        else call
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _function(function: Mapping[str, Any], kinds: ArgumentKinds) -> Mapping[str, Any]:
    values = json.loads(function["arguments"])
    texts = {
        key: written(value, kinds[key]) if isinstance(value, str) else value
        for key, value in values.items()
    }
    if texts == values:
        return function  # unchanged, with the model's spaces, which a cache may hold
    return {**function, "arguments": json.dumps(texts, ensure_ascii=False)}

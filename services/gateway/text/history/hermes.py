"""Writes tools, calls and results as text in the Hermes format, for chat templates that have no
form for them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

from services.gateway.text.history.contents import enclosed, joined

Messages = Sequence[Mapping[str, Any]]

_INSTRUCTIONS = """\
# Tools

You can call functions. Their signatures, one JSON object per line:
<tools>
{tools}
</tools>

To call a function, write a JSON object with its name and arguments between these tags, one object \
for each call:
<tool_call>
{{"name": "NAME", "arguments": {{"ARGUMENT": "VALUE"}}}}
</tool_call>
Results follow between <tool_response> and </tool_response>."""


def in_hermes_format(messages: Messages, tools: Messages) -> list[dict[str, Any]]:
    """Returns messages of the roles system, user and assistant alone, with texts as contents: tools
    in the first system message, calls in the assistant's, results in messages of the user.
    """
    converted = list(_merged(_converted(each) for each in messages))
    if not tools:
        return converted
    block = _INSTRUCTIONS.format(tools="\n".join(_json(each) for each in tools))
    if converted and converted[0]["role"] == "system":
        system, *others = converted
        content = joined(system["content"], block, "\n\n") if system["content"] else block
        return [{**system, "content": content}, *others]
    return [{"role": "system", "content": block}, *converted]


def _converted(message: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Returns the message, and whether it is a result."""
    if message["role"] == "tool":
        content = enclosed("<tool_response>\n", message["content"], "\n</tool_response>")
        return {"role": "user", "content": content}, True
    calls = message.get("tool_calls") or ()
    contents = [*filter(None, [message["content"], *map(_call, calls)])] or [""]
    others = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**others, "content": reduce(joined, contents)}, False


def _merged(messages: Iterator[tuple[dict[str, Any], bool]]) -> Iterator[dict[str, Any]]:
    """Joins results that follow each other: many templates refuse two messages of one role."""
    last: dict[str, Any] | None = None
    for message, is_result in messages:
        if is_result and last is not None:
            last["content"] = joined(last["content"], message["content"])
            continue
        if last is not None:
            yield last
            last = None
        if is_result:
            last = message
        else:
            yield message
    if last is not None:
        yield last


def _call(call: Mapping[str, Any]) -> str:
    """Writes a call whose `arguments` are JSON text already."""
    function = call["function"]
    text = f'{{"name": {_json(function["name"])}, "arguments": {function["arguments"]}}}'
    return f"<tool_call>\n{text}\n</tool_call>"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)

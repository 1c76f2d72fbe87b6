"""Writes messages in the wire format of each family, as its chat template does."""

# ruff: noqa: RUF001  # DeepSeek's markers have fullwidth bars

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Call(NamedTuple):
    name: str
    arguments: dict[str, Any]


class Message(NamedTuple):
    content: str = ""
    calls: Sequence[Call] = ()
    thinking: str = ""


def wire_text(family: str, message: Message) -> str:
    """The output of a model of the family. One that must start with its calls has no content."""
    return _WRITERS[family](message)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _named(call: Call, key: str = "arguments") -> dict[str, Any]:
    return {"name": call.name, key: call.arguments}


def _thought(message: Message, opening: str = "<think>", close: str = "</think>") -> str:
    return f"{opening}\n{message.thinking}\n{close}\n\n" if message.thinking else ""


def _hermes(message: Message) -> str:
    calls = (f"\n<tool_call>\n{_json(_named(each))}\n</tool_call>" for each in message.calls)
    return _thought(message) + message.content + "".join(calls)


def _qwen_xml(message: Message) -> str:
    return _thought(message) + message.content + "".join(map(_xml_call, message.calls))


def _xml_call(call: Call) -> str:
    parameters = (
        f"<parameter={key}>\n{value if isinstance(value, str) else _json(value)}\n</parameter>\n"
        for key, value in call.arguments.items()
    )
    return f"\n<tool_call>\n<function={call.name}>\n{''.join(parameters)}</function>\n</tool_call>"


def _glm(message: Message) -> str:
    return _thought(message) + message.content + "".join(map(_glm_call, message.calls))


def _glm_call(call: Call) -> str:
    arguments = (
        f"<arg_key>{key}</arg_key>\n"
        f"<arg_value>{value if isinstance(value, str) else _json(value)}</arg_value>\n"
        for key, value in call.arguments.items()
    )
    return f"\n<tool_call>{call.name}\n{''.join(arguments)}</tool_call>"


def _llama_json(message: Message) -> str:
    calls = "; ".join(_json(_named(each, "parameters")) for each in message.calls)
    return calls or message.content


def _pythonic(message: Message) -> str:
    calls = (
        f"{each.name}({', '.join(f'{key}={value!r}' for key, value in each.arguments.items())})"
        for each in message.calls
    )
    return f"[{', '.join(calls)}]" if message.calls else message.content


def _mistral_list(message: Message) -> str:
    calls = f"[TOOL_CALLS]{_json([_named(each) for each in message.calls])}"
    return message.content + (calls if message.calls else "")


def _mistral_args(message: Message) -> str:
    calls = (f"[TOOL_CALLS]{each.name}[ARGS]{_json(each.arguments)}" for each in message.calls)
    return message.content + "".join(calls)


def _phi_list(message: Message) -> str:
    calls = f"<|tool_call|>{_json([_named(each) for each in message.calls])}<|/tool_call|>"
    return message.content + (calls if message.calls else "")


def _gemma(opening: str, close: str, mark: str) -> Callable[[Message], str]:
    def value_of(value: Any) -> str:
        match value:
            case str():
                return f"{mark}{value}{mark}"
            case dict():
                return "{" + ",".join(f"{k}:{value_of(v)}" for k, v in value.items()) + "}"
            case list():
                return "[" + ",".join(map(value_of, value)) + "]"
        return _json(value)

    def write(message: Message) -> str:
        calls = (f"{opening}call:{c.name}{value_of(c.arguments)}{close}" for c in message.calls)
        thought = f"<|channel>thought\n{message.thinking}\n<channel|>" if message.thinking else ""
        return thought + message.content + "".join(calls)

    return write


def _kimi(message: Message) -> str:
    calls = "".join(
        f"<|tool_call_begin|>functions.{each.name}:{index}<|tool_call_argument_begin|>"
        f"{_json(each.arguments)}<|tool_call_end|>"
        for index, each in enumerate(message.calls)
    )
    section = f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>" if calls else ""
    return _thought(message) + message.content + section


def _deepseek(opening: str, close: str) -> Callable[[Message], str]:
    def write(message: Message) -> str:
        calls = "\n".join(
            "<｜tool▁call▁begin｜>"
            + opening.format(name=each.name)
            + _json(each.arguments)
            + f"{close}<｜tool▁call▁end｜>"
            for each in message.calls
        )
        section = f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>" if calls else ""
        return _thought(message) + message.content + section

    return write


def _harmony(message: Message) -> str:
    parts = []
    if message.thinking:
        parts.append(f"<|channel|>analysis<|message|>{message.thinking}<|end|>")
    if message.content:
        channel = "commentary" if message.calls else "final"
        parts.append(f"<|channel|>{channel}<|message|>{message.content}<|end|>")
    parts += [
        f"<|channel|>commentary to=functions.{each.name} <|constrain|>json<|message|>"
        f"{_json(each.arguments)}<|call|>"
        for each in message.calls
    ]
    return "<|start|>assistant".join(parts)


_WRITERS: dict[str, Callable[[Message], str]] = {
    "hermes": _hermes,
    "qwen_xml": _qwen_xml,
    "glm": _glm,
    "llama_json": _llama_json,
    "pythonic": _pythonic,
    "mistral_list": _mistral_list,
    "mistral_args": _mistral_args,
    "phi_list": _phi_list,
    "function_gemma": _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "kimi": _kimi,
    "deepseek_v3": _deepseek("function<｜tool▁sep｜>{name}\n```json\n", "\n```"),
    "deepseek_v31": _deepseek("{name}<｜tool▁sep｜>", ""),
    "harmony": _harmony,
}
THINKING_FAMILIES = {
    "hermes",
    "qwen_xml",
    "glm",
    "gemma4",
    "kimi",
    "deepseek_v3",
    "deepseek_v31",
    "harmony",
}
CALLS_ONLY_FAMILIES = {"llama_json", "pythonic"}  # a message is calls or content

# ruff: noqa: RUF001 - markers of DeepSeek have full-width bars

"""Reads calls back from outputs, independently of the gateway's parser."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from services.gateway.structured.tools.family import CallFormat

Call = tuple[str, dict[str, Any]]

_NAMED = {
    "mistral_args": r"\[TOOL_CALLS\](?P<name>\w+)\[ARGS\]",
    "kimi": r"<\|tool_call_begin\|>functions\.(?P<name>\w+):\d+<\|tool_call_argument_begin\|>",
    "deepseek_v3": r"function<｜tool▁sep｜>(?P<name>\w+)\n```json\n",
    "deepseek_v31": r"<｜tool▁call▁begin｜>(?P<name>\w+)<｜tool▁sep｜>",
    "harmony": r"to=functions\.(?P<name>\w+) <\|constrain\|>json<\|message\|>",
}
_OPENINGS = {
    "hermes": r"<tool_call>\n?",
    "llama_json": r"(?:^|; ?)(?=\{)",
    "mistral_list": r"(?:\[TOOL_CALLS\] ?\[|, ?)(?=\{\"name)",
    "phi_list": r"(?:<\|tool_call\|>\[|, ?)(?=\{\"name)",
}
_GEMMA = {"function_gemma": "<escape>", "gemma4": '<|"|>'}


def read_calls(format: CallFormat, output: str) -> list[Call]:
    if format in _NAMED:
        return [
            (found["name"], _json_at(output, found.end()))
            for found in re.finditer(_NAMED[format], output)
        ]
    if format in _OPENINGS:
        bodies = [_json_at(output, each.end()) for each in re.finditer(_OPENINGS[format], output)]
        key = "parameters" if format == "llama_json" else "arguments"
        return [(each["name"], each[key]) for each in bodies]
    if format == "pythonic":
        return [_python_call(each) for each in ast.parse(output, mode="eval").body.elts]
    if format == "qwen_xml":
        return [_xml_call(*each) for each in re.findall(_FUNCTION, output)]
    if format == "glm":
        return [_glm_call(*each) for each in re.findall(_GLM_CALL, output)]
    quote = re.escape(_GEMMA[format])
    return [_gemma_call(quote, *each) for each in re.findall(r"call:(\w+)(\{.*?\})<", output)]


_FUNCTION = r"(?s)<tool_call>\n<function=(\w+)>\n(.*?)</function>\n</tool_call>"
_PARAMETER = r"(?s)<parameter=(\w+)>\n(.*?)\n</parameter>\n"
_GLM_CALL = r"(?s)<tool_call>(\w+)\n(.*?)</tool_call>"
_GLM_ARGUMENT = r"(?s)<arg_key>(\w+)</arg_key>\n<arg_value>(.*?)</arg_value>\n"
_TEXTS = ("city", "units", "input")


def _json_at(output: str, start: int) -> Any:
    text = output[start:].lstrip()
    return json.JSONDecoder().raw_decode(text)[0]


def _python_call(call: ast.Call) -> Call:
    arguments = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
    return call.func.id, arguments


def _xml_call(name: str, body: str) -> Call:
    pairs = re.findall(_PARAMETER, body)
    return name, {key: value if key in _TEXTS else json.loads(value) for key, value in pairs}


def _glm_call(name: str, body: str) -> Call:
    pairs = re.findall(_GLM_ARGUMENT, body)
    return name, {key: value if key in _TEXTS else json.loads(value) for key, value in pairs}


def _gemma_call(quote: str, name: str, body: str) -> Call:
    parts = re.split(f"(?s){quote}(.*?){quote}", body)
    joined = "".join(
        json.dumps(each) if index % 2 else re.sub(r"([{,] ?)(\w+):", r'\1"\2":', each)
        for index, each in enumerate(parts)
    )
    return name, json.loads(joined)

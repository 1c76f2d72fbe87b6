"""The families of models, by their formats of calls and reasoning.

Frames are in Hugging Face's `response_template`, with the additional body formats that
`parsing/response_template.py` describes. The formats are those of the models' chat templates.
"""

# ruff: noqa: RUF001  # DeepSeek's markers have fullwidth bars

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from services.gateway.structured.tools.family import Family

_FUNCTION = "function"
_OPTIONAL_START = r"(?:<\|start\|>assistant)?"


def _call(name: str, arguments: str) -> dict[str, Any]:
    return {"type": _FUNCTION, _FUNCTION: {"name": name, "arguments": arguments}}


def _template(
    anchor: str, calls: Mapping[str, Any] | None, *, section_end: str = ""
) -> dict[str, Any]:
    """Returns a response template. `section_end` follows all calls and is a field that is not
    shown.
    """
    fields: dict[str, Any] = {"content": {"content": "text"}}
    if calls is not None:
        fields["tool_calls"] = {"repeats": True, "content": "json", **calls}
    if section_end:
        fields["section_end"] = {"open": section_end, "close_pattern": ""}
    return {"defaults": {"role": "assistant"}, "start_anchor": anchor, "fields": fields}


def with_thinking(family: Family, opening: str, close: str) -> Family:
    template = family.response_template
    thinking = {"open": opening, "close": close, "repeats": True, "join": "\n"}
    return msgspec.structs.replace(
        family,
        think_open=opening,
        think_close=close,
        response_template={**template, "fields": {**template["fields"], "thinking": thinking}},
    )


_CHATML = "<|im_start|>assistant\n"
_LLAMA = "<|start_header_id|>assistant<|end_header_id|>\n\n"
_BY_CONTENT = _call("{content.name}", "{content.arguments}")
_BY_ITEM = _call("{name}", "{arguments}")
_BY_CAPTURE = _call("{name}", "{content}")
_DEEPSEEK_OPEN = r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>"
_DEEPSEEK_CLOSE = "<｜tool▁call▁end｜>"

HERMES = Family(
    name="hermes",
    call_format="hermes",
    trigger="<tool_call>",
    call_close="</tool_call>",
    response_template=_template(
        _CHATML, {"open": "<tool_call>", "close": "</tool_call>", "transform": _BY_CONTENT}
    ),
)
QWEN_XML = Family(
    name="qwen_xml",
    call_format="qwen_xml",
    trigger="<tool_call>",
    call_close="</tool_call>",
    response_template=_template(
        _CHATML,
        {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>\s*",
            "close_pattern": r"</function>\s*</tool_call>",
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
            },
            "transform": _BY_CAPTURE,
        },
    ),
)
GLM = Family(
    name="glm",
    call_format="glm",
    trigger="<tool_call>",
    call_close="</tool_call>",
    response_template=_template(
        "<|assistant|>",
        {
            "open_pattern": (r"<tool_call>\s*(?P<name>[^<\s]+?)\s*(?=<arg_key>|</tool_call>)"),
            "close": "</tool_call>",
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": (
                    r"<arg_key>\s*(?P<key>.*?)\s*</arg_key>\s*"
                    r"<arg_value>(?P<value>.*?)</arg_value>"
                )
            },
            "transform": _BY_CAPTURE,
        },
    ),
)
LLAMA_JSON = Family(
    name="llama_json",
    call_format="llama_json",
    response_template=_template(
        _LLAMA,
        {
            "open_pattern": (
                r"\A\s*(?:<\|python_tag\|>|<\|python_start\|>\s*(?:<\|python_end\|>)?)?\s*(?=\{)"
            ),
            "content_args": {"separator": ";"},
            "transform": _call("{content.name}", "{content.parameters}"),
        },
    ),
)
PYTHONIC = Family(
    name="pythonic",
    call_format="pythonic",
    response_template=_template(
        _LLAMA,
        {
            "open_pattern": r"\A\s*(?:<\|python_start\|>\s*)?(?=\[\s*[A-Za-z_][\w.]*\()",
            "close": "<|python_end|>",
            "content": "python-calls",
            "transform": _BY_ITEM,
            "transform_each": True,
        },
    ),
)
MISTRAL_LIST = Family(
    name="mistral_list",
    call_format="mistral_list",
    trigger="[TOOL_CALLS]",
    call_ids="mistral",
    response_template=_template(
        "[/INST]",
        {"open_pattern": r"\[TOOL_CALLS\]\s*", "transform": _BY_ITEM, "transform_each": True},
    ),
)
MISTRAL_ARGS = Family(
    name="mistral_args",
    call_format="mistral_args",
    trigger="[TOOL_CALLS]",
    call_ids="mistral",
    response_template=_template(
        "[/INST]",
        {
            "open_pattern": (
                r"\[TOOL_CALLS\]\s*(?P<name>[^\[\]{}\s]+)(?:\[CALL_ID\][^\[\]{}]*)?\[ARGS\]\s*"
            ),
            "transform": _BY_CAPTURE,
        },
    ),
)
PHI_LIST = Family(
    name="phi_list",
    call_format="phi_list",
    trigger="<|tool_call|>",
    call_close="<|/tool_call|>",
    response_template=_template(
        "<|assistant|>",
        {
            "open": "<|tool_call|>",
            "close": "<|/tool_call|>",
            "transform": _BY_ITEM,
            "transform_each": True,
        },
    ),
)
FUNCTION_GEMMA = Family(
    name="function_gemma",
    call_format="function_gemma",
    trigger="<start_function_call>",
    call_close="<end_function_call>",
    response_template=_template(
        "<start_of_turn>model\n",
        {
            "open_pattern": r"<start_function_call>call:(?P<name>[^{\s]+)(?=\{)",
            "close": "<end_function_call>",
            "content_args": {"unquoted_keys": True, "string_delims": [["<escape>", "<escape>"]]},
            "transform": _BY_CAPTURE,
        },
    ),
)
GEMMA4 = with_thinking(
    Family(
        name="gemma4",
        call_format="gemma4",
        trigger="<|tool_call>",
        call_close="<tool_call|>",
        response_template=_template(
            "<|turn>model\n",
            {
                "open_pattern": r"<\|tool_call>call:(?P<name>[^{\s]+)(?=\{)",
                "close": "<tool_call|>",
                "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
                "transform": _BY_CAPTURE,
            },
        ),
    ),
    "<|channel>thought\n",
    "<channel|>",
)
KIMI = Family(
    name="kimi",
    call_format="kimi",
    trigger="<|tool_calls_section_begin|>",
    call_close="<|tool_calls_section_end|>",
    call_ids="kimi",
    response_template=_template(
        "<|im_assistant|>assistant<|im_middle|>",
        {
            "open_pattern": (
                r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*"
                r"(?:functions\.)?(?P<name>[^:<>\s]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*"
            ),
            "close": "<|tool_call_end|>",
            "transform": _BY_CAPTURE,
        },
        section_end="<|tool_calls_section_end|>",
    ),
)
DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    call_format="deepseek_v3",
    trigger="<｜tool▁calls▁begin｜>",
    call_close="<｜tool▁calls▁end｜>",
    response_template=_template(
        "<｜Assistant｜>",
        {
            "open_pattern": (
                _DEEPSEEK_OPEN + r"function<｜tool▁sep｜>(?P<name>[^\n<`]+)\n```json\s*"
            ),
            "close": "```" + _DEEPSEEK_CLOSE,
            "transform": _BY_CAPTURE,
        },
        section_end="<｜tool▁calls▁end｜>",
    ),
)
DEEPSEEK_V31 = Family(
    name="deepseek_v31",
    call_format="deepseek_v31",
    trigger="<｜tool▁calls▁begin｜>",
    call_close="<｜tool▁calls▁end｜>",
    response_template=_template(
        "<｜Assistant｜>",
        {
            "open_pattern": _DEEPSEEK_OPEN + r"(?P<name>[^\n<]+)<｜tool▁sep｜>\s*",
            "close": _DEEPSEEK_CLOSE,
            "transform": _BY_CAPTURE,
        },
        section_end="<｜tool▁calls▁end｜>",
    ),
)
HARMONY = Family(
    name="harmony",
    call_format="harmony",
    call_close="<|call|>",
    think_open="<|channel|>analysis<|message|>",
    think_close="<|end|>",
    response_template={
        "defaults": {"role": "assistant"},
        "start_anchor": "<|start|>assistant",
        "fields": {
            "thinking": {
                "open_pattern": _OPTIONAL_START + r"<\|channel\|>analysis<\|message\|>",
                "close": "<|end|>",
                "repeats": True,
                "join": "\n",
            },
            "content": {
                "open_pattern": (
                    _OPTIONAL_START + r"<\|channel\|>(?:final|commentary)"
                    r"(?: ?<\|constrain\|>\w+)?<\|message\|>"
                ),
                "close": ["<|end|>", "<|return|>"],
                "repeats": True,
                "join": "\n",
            },
            "tool_calls": {
                "open_pattern": (
                    _OPTIONAL_START + r"(?: to=(?:functions\.)?(?P<name>[^<\s]+))?"
                    r"<\|channel\|>(?:commentary|analysis)"
                    r"(?: to=(?:functions\.)?(?P<name>[^<\s]+))?"
                    r"\s*(?:(?:<\|constrain\|>)?(?:json|code))?\s*<\|message\|>"
                ),
                "close": "<|call|>",
                "repeats": True,
                "content": "json",
                "transform": _BY_CAPTURE,
            },
        },
    },
)
PLAIN = Family(name="plain", call_format=None, response_template=_template("", None))

FAMILIES: dict[str, Family] = {
    each.name: each
    for each in (
        HERMES,
        QWEN_XML,
        GLM,
        LLAMA_JSON,
        PYTHONIC,
        MISTRAL_LIST,
        MISTRAL_ARGS,
        PHI_LIST,
        FUNCTION_GEMMA,
        GEMMA4,
        KIMI,
        DEEPSEEK_V3,
        DEEPSEEK_V31,
        HARMONY,
        PLAIN,
    )
}

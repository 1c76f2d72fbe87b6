"""The grammar of an answer's calls: tools' names, each with arguments that match its schema.

Frames are Lark, with «…» around placeholders (the tool's name, its arguments, the calls) and around
markers of a format, which are tokens or text. Optional spaces and newlines vary in the training
data of models; everything else is exact.
"""

# ruff: noqa: RUF001 - markers of DeepSeek have full-width bars

from __future__ import annotations

import re
from collections.abc import Callable
from keyword import iskeyword

import msgspec

from services.gateway.structured.tools.argument_grammars import (
    ArgumentStyle,
    argument_rules,
)
from services.gateway.structured.tools.family import CallFormat, Family
from services.gateway.structured.tools.lark import TokenIdOf, any_of, literal, marker
from services.gateway.structured.tools.tool import Tool, ToolOptions
from shared.errors import InvalidRequest

_TAG_ENDS = re.compile(r"[<>\n]")
_BARE_KEY = re.compile(r"[\w$-]+")
_PLACE = re.compile("«([^»]*)»")
_FIRST_MARKER = re.compile(r"\s*«(?!calls»)[^»]*»\s*")


class LarkRules(msgspec.Struct, frozen=True):
    """The rules of an answer's calls. `start` is the rule that matches the calls; all names in
    `rules` begin with `call_`. `warnings` name the keywords of the tools' schemas that they do not
    enforce.
    """

    start: str
    rules: str
    warnings: tuple[str, ...] = ()


class _Frame(msgspec.Struct, frozen=True):
    """The frame of a format's calls. `section` encloses all calls. `joint` separates two, or is
    None if an answer has one call.
    """

    call: str
    joint: str | None = '""'
    section: str = "«calls»"
    style: ArgumentStyle = "json"


def _json_call(arguments: str) -> str:
    return (
        rf'"{{\"name\":" " "? "\"«name»\"," " "? "\"{arguments}\":" " "? '
        '«arguments» " "? "}"'
    )


_COMMA = '"," " "?'
_FRAMES: dict[CallFormat, _Frame] = {
    "hermes": _Frame(
        f'«<tool_call>» "\\n"? {_json_call("arguments")} "\\n"? «</tool_call>»', joint='"\\n"?'
    ),
    "qwen_xml": _Frame(
        '«<tool_call>» "\\n<function=«name»>\\n" «arguments» "</function>\\n" «</tool_call>»',
        joint='"\\n"?',
        style="xml",
    ),
    "glm": _Frame(
        '«<tool_call>» "«name»\\n" «arguments» «</tool_call>»', joint='"\\n"?', style="glm"
    ),
    "llama_json": _Frame(_json_call("parameters"), joint='";" " "?'),
    "pythonic": _Frame(
        '"«name»(" «arguments» ")"', joint=_COMMA, section='"[" «calls» "]"', style="python"
    ),
    "mistral_list": _Frame(
        _json_call("arguments"), joint=_COMMA, section='«[TOOL_CALLS]» " "? "[" «calls» "]"'
    ),
    "mistral_args": _Frame('«[TOOL_CALLS]» "«name»" «[ARGS]» «arguments»'),
    "phi_list": _Frame(
        _json_call("arguments"),
        joint=_COMMA,
        section='«<|tool_call|>» "[" «calls» "]" «<|/tool_call|>»',
    ),
    "function_gemma": _Frame(
        '«<start_function_call>» "call:«name»{" «arguments» "}" «<end_function_call>»',
        style="function_gemma",
    ),
    "gemma4": _Frame(
        '«<|tool_call>» "call:«name»{" «arguments» "}" «<tool_call|>»', style="gemma4"
    ),
    "kimi": _Frame(
        '«<|tool_call_begin|>» "functions.«name»:" /[0-9]{1,4}/ «<|tool_call_argument_begin|>» '
        "«arguments» «<|tool_call_end|>»",
        section="«<|tool_calls_section_begin|>» «calls» «<|tool_calls_section_end|>»",
    ),
    "deepseek_v3": _Frame(
        '«<｜tool▁call▁begin｜>» "function" «<｜tool▁sep｜>» "«name»\\n```json\\n" «arguments» '
        '"\\n```" «<｜tool▁call▁end｜>»',
        joint='"\\n"?',
        section="«<｜tool▁calls▁begin｜>» «calls» «<｜tool▁calls▁end｜>»",
    ),
    "deepseek_v31": _Frame(
        '«<｜tool▁call▁begin｜>» "«name»" «<｜tool▁sep｜>» «arguments» «<｜tool▁call▁end｜>»',
        section="«<｜tool▁calls▁begin｜>» «calls» «<｜tool▁calls▁end｜>»",
    ),
    # The call's end, <|call|>, is a stop token.
    "harmony": _Frame(
        '(«<|start|>» "assistant")? «<|channel|>» "commentary to=functions.«name» " '
        '«<|constrain|>» "json" «<|message|>» «arguments»',
        joint=None,
    ),
}


def call_grammar(
    family: Family, options: ToolOptions, token_id_of: TokenIdOf, *, after_trigger: bool
) -> LarkRules | None:
    """Returns the rules of an answer's calls: one, or several if `options.is_parallel`. With
    `after_trigger`, they match the text after the family's trigger, which is one call if each call
    has its own trigger. Returns None if the family has no calls or no tool may be called. Raises
    InvalidRequest for a tool whose input cannot be constrained.
    """
    tools = options.callable_tools
    if family.call_format is None or not tools:
        return None
    frame = _FRAMES[family.call_format]
    call, section, is_single = frame.call, frame.section, not options.is_parallel
    if after_trigger and _FIRST_MARKER.match(section):
        section = _FIRST_MARKER.sub("", section, count=1)
    elif after_trigger and _FIRST_MARKER.match(call):
        call, is_single = _FIRST_MARKER.sub("", call, count=1), True

    rules, warnings = list[str](), list[str]()
    for index, tool in enumerate(tools):
        _check_names(tool, frame.style)
        places = {"name": literal(tool.name)[1:-1], "arguments": f"call_{index}_arguments"}
        rules.append(f"call_{index}: {_filled(call, places, token_id_of)}")
        arguments = argument_rules(places["arguments"], tool, frame.style, token_id_of)
        rules += arguments.lines
        warnings += (f"{tool.schema_param}: ignored: {e}" for e in arguments.unenforced)
    each = any_of(f"call_{index}" for index in range(len(tools)))
    calls = each if is_single or frame.joint is None else f"{each} ({frame.joint} {each})*"
    start = _filled(section, {"calls": calls}, token_id_of)
    return LarkRules("call_section", "\n".join([f"call_section: {start}", *rules]), tuple(warnings))


def _check_names(tool: Tool, style: ArgumentStyle) -> None:
    """Raises InvalidRequest for a name that the format cannot contain as a Python identifier, in a
    tag, or as a bare key.
    """
    can_be: Callable[[str], bool] = {
        "json": lambda name: True,
        "xml": lambda name: not _TAG_ENDS.search(name),
        "glm": lambda name: not _TAG_ENDS.search(name) and name == name.strip(),
        "python": lambda name: name.isidentifier() and not iskeyword(name),
    }.get(style, lambda name: _BARE_KEY.fullmatch(name) is not None)
    names = tool.name.split(".") if style == "python" else ()
    properties = tool.parameters.get("properties", {})
    for name in (*names, *(properties if isinstance(properties, dict) else ())):
        if not can_be(name):
            raise InvalidRequest(
                f"{tool.param}: this model's calls cannot hold the name {name[:64]!r}",
                param=tool.param,
            )


def _filled(frame: str, places: dict[str, str], token_id_of: TokenIdOf) -> str:
    def filled(found: re.Match[str]) -> str:
        place = places.get(found[1])
        return marker(found[1], token_id_of) if place is None else place

    return _PLACE.sub(filled, frame)

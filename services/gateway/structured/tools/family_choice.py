"""The choice of a model's family, from its checkpoint or by the operator.

operator's file or name ──▶ the checkpoint's `response_template` ──▶ markers in its chat template
"""

# ruff: noqa: RUF001  # DeepSeek's markers have fullwidth bars

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import structlog

from services.gateway.structured.tools.families import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    FAMILIES,
    FUNCTION_GEMMA,
    GEMMA4,
    GLM,
    HARMONY,
    HERMES,
    KIMI,
    LLAMA_JSON,
    MISTRAL_ARGS,
    MISTRAL_LIST,
    PHI_LIST,
    PLAIN,
    PYTHONIC,
    QWEN_XML,
    with_thinking,
)
from services.gateway.structured.tools.family import Family
from services.gateway.structured.tools.parsing.marker_tokens import MarkerTokens
from services.gateway.structured.tools.parsing.response_template import compiled_template
from services.gateway.text.model_files import ModelText
from shared.errors import ConfigError
from shared.transport.wire_errors import UNREADABLE

log = structlog.get_logger(__name__)

OFF = "off"
_THINK = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
# The first family whose markers are all in the chat template is chosen: specific ones come first.
_MARKERS: tuple[tuple[Family, tuple[str, ...]], ...] = (
    (HARMONY, ("<|channel|>", "<|start|>")),
    (GEMMA4, ("<|tool_call>",)),
    (FUNCTION_GEMMA, ("<start_function_call>",)),
    (KIMI, ("<|tool_calls_section_begin|>",)),
    (DEEPSEEK_V3, ("<｜tool▁calls▁begin｜>", "```json")),
    (DEEPSEEK_V31, ("<｜tool▁calls▁begin｜>",)),
    (MISTRAL_ARGS, ("[TOOL_CALLS]", "[ARGS]")),
    (MISTRAL_LIST, ("[TOOL_CALLS]",)),
    (PHI_LIST, ("<|tool_call|>",)),
    (QWEN_XML, ("<tool_call>", "<function=")),
    (GLM, ("<tool_call>", "<arg_key>")),
    (HERMES, ("<tool_call>",)),
    (PYTHONIC, ("[func_name1(",)),
    (LLAMA_JSON, ("<|start_header_id|>", '"parameters"')),
    (LLAMA_JSON, ("<|header_start|>", '"parameters"')),  # Llama 4
)


def family_of(files: ModelText, choice: str = "", *, tool_format: str = "template") -> Family:
    """Returns the family of a model. `choice` is a family's name, a file with a response template,
    "off", with which no calls and no reasoning are recognised, or empty for the checkpoint's
    family. `tool_format` is how tools are passed to a chat template without them. Raises
    ConfigError for other choices. Compiles expressions of the checkpoint, which may never end: call
    it in a process that can be killed.
    """
    template = files.chat_template
    source = None if template is None else template.text
    family = family_of_template(source)
    if choice == OFF:
        return msgspec.structs.replace(PLAIN, call_ids=family.call_ids)
    if choice in FAMILIES:
        return _with_thinking(FAMILIES[choice], source or "")
    if choice:
        return with_template(family, _read(choice))
    if files.response_template is not None:
        try:
            return with_template(family, files.response_template)
        except ConfigError as error:  # a newer version: a table of ours is better than no model
            log.warning("response_template_unused", reason=str(error), family=family.name)
    if tool_format == "hermes" and template is not None and not template.compiled().takes_tools:
        return _with_thinking(HERMES, source or "")
    return family


def _read(choice: str) -> dict[str, Any]:
    if not Path(choice).is_file():
        names = ", ".join((OFF, *FAMILIES))
        raise ConfigError(f"response_template {choice!r} is neither a file nor one of {names}")
    try:
        return msgspec.json.decode(Path(choice).read_bytes(), type=dict[str, Any])
    except (OSError, *UNREADABLE) as error:
        raise ConfigError(f"cannot read {choice}: {error}") from error


def with_template(family: Family, template: dict[str, Any]) -> Family:
    """Returns the family with an operator's or checkpoint's response template. `family` is that of
    the chat template, for the grammars of calls. Raises ConfigError.
    """
    found = compiled_template(template, MarkerTokens())
    has_thinking = found.first("thinking") is not None
    opening, close = _thinking_marks(template)
    return msgspec.structs.replace(
        family,
        response_template=template,
        call_format=family.call_format if found.first("calls") is not None else None,
        think_open=(opening or family.think_open) if has_thinking else "",
        think_close=(close or family.think_close) if has_thinking else "",
    )


def _thinking_marks(template: dict[str, Any]) -> tuple[str, str]:
    """Returns the marks around reasoning, each empty if the template has a pattern or several
    texts.
    """
    fields = template["fields"]
    names = ("thinking", "reasoning", "reasoning_content")
    field: dict[str, Any] = next((fields[name] for name in names if name in fields), {})
    opening, close = field.get("open"), field.get("close")
    return (
        opening if isinstance(opening, str) else "",
        close if isinstance(close, str) else "",
    )


def family_of_template(source: str | None) -> Family:
    """Returns the family of a chat template, with the marks of reasoning that the template
    contains.
    """
    if source is None:
        return PLAIN
    for family, markers in _MARKERS:
        if all(marker in source for marker in markers):
            return _with_thinking(family, source)
    return _with_thinking(PLAIN, source)


def _with_thinking(family: Family, source: str) -> Family:
    if family.think_close:
        return family
    for opening, close in _THINK:
        if close in source:
            return with_thinking(family, opening, close)
    return family

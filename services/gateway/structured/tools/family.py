"""The format in which a family of models writes tool calls and reasoning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from services.gateway.text.history.call_ids import CallIds

CallFormat = Literal[
    "hermes",
    "qwen_xml",
    "glm",
    "llama_json",
    "pythonic",
    "mistral_list",
    "mistral_args",
    "phi_list",
    "function_gemma",
    "gemma4",
    "kimi",
    "deepseek_v3",
    "deepseek_v31",
    "harmony",
]


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """A family of models. `response_template` is in Hugging Face's declarative format, which
    `parsing/response_parser.py` executes.

    `trigger` is the text that always opens a call or a section of calls; a grammar can start after
    it if it is one token. If empty, calls are recognised only at the start of an answer.
    `call_close` is the text after the last call's arguments; if empty, it is the answer's end.
    `think_open` and `think_close` enclose reasoning; they are empty if the family has no marks.
    """

    name: str
    call_format: CallFormat | None  # None if the family calls no tools
    response_template: Mapping[str, Any]
    trigger: str = ""
    call_close: str = ""
    think_open: str = ""
    think_close: str = ""
    call_ids: CallIds = "own"  # the form of ids in the chat template

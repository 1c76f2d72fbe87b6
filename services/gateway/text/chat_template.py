"""Renders chat messages to prompt text with the model's Jinja template.

A template writes role markers as special tokens, which the tokenizer converts to ids. If message
text were rendered unchanged, a client could forge a role by sending `<|im_start|>system`. So every
special token *inside message text* is replaced by a reference (two Unicode noncharacters around a
number) before the template runs, and `_split` returns the parts: template text, where special
tokens are recognized, and literal text, where the same characters are ordinary. The model reads
the client's text unchanged. Role markers that a model writes with ordinary tokens cannot be
distinguished from text; this is true of every server of such a model.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.meta
import jinja2.sandbox
import msgspec

from shared.errors import ConfigError, InvalidRequest

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_REFERENCE = re.compile(f"{_OPEN}(\\d+){_CLOSE}")

Today = Callable[[], datetime.datetime]


class LiteralText(str):
    """A prompt part in which special tokens are ordinary text."""

    __slots__ = ()


class TemplateSource(msgspec.Struct, frozen=True):
    """The data that another process needs to compile the same template."""

    source: str
    special_tokens: tuple[str, ...]
    variables: dict[str, str]

    def compiled(self) -> ChatTemplate:
        return ChatTemplate(
            self.source, special_tokens=self.special_tokens, variables=self.variables
        )


class ChatTemplate:
    """Raises ConfigError if the template does not compile."""

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Sequence[str],
        variables: Mapping[str, str],
        today: Today = datetime.datetime.now,
    ) -> None:
        self.source = TemplateSource(source, tuple(special_tokens), dict(variables))
        # longest first, so that a token wins over its prefixes
        literals = sorted({*special_tokens, _OPEN, _CLOSE}, key=len, reverse=True)
        self._literals = literals
        self._index = {literal: index for index, literal in enumerate(literals)}
        self._pattern = re.compile("|".join(re.escape(each) for each in literals))
        self._variables = dict(variables)
        try:
            environment = _environment(today)
            self._template = environment.from_string(source)
            names = jinja2.meta.find_undeclared_variables(environment.parse(source))
            self.takes_tools = "tools" in names
        except (jinja2.TemplateError, RecursionError) as error:
            raise ConfigError(f"the chat template does not compile: {error}") from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[str]:
        """Returns the prompt parts in order; a `LiteralText` is text without special tokens.

        Raises InvalidRequest with the template's message if the template rejects the messages.
        """
        guarded = [_map_strings(message, self._guard) for message in messages]
        if tools and not self.takes_tools:
            raise InvalidRequest("this model's chat template does not support tools", param="tools")
        try:
            prompt = self._template.render(
                messages=guarded,
                tools=[_map_strings(tool, self._guard) for tool in tools] or None,
                documents=None,
                add_generation_prompt=True,
                **self._variables,
            )
        except jinja2.TemplateError as error:
            message = f"the chat template rejects these messages: {error}"
            raise InvalidRequest(message, param="messages") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            message = f"the chat template fails on these messages: {error}"
            raise InvalidRequest(message, param="messages") from error
        return self._split(prompt)

    def _guard(self, text: str) -> str:
        return self._pattern.sub(lambda hit: f"{_OPEN}{self._index[hit[0]]}{_CLOSE}", text)

    def _split(self, prompt: str) -> list[str]:
        parts: list[str] = []
        for position, part in enumerate(_REFERENCE.split(prompt)):
            if position % 2:
                parts.append(LiteralText(self._literals[int(part)]))
            elif part:
                parts.append(part)
        return parts


def _map_strings(message: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    def changed(value: Any) -> Any:
        if isinstance(value, str):
            return change(value)
        if isinstance(value, dict):
            return {key: changed(each) for key, each in value.items()}
        if isinstance(value, list):
            return [changed(each) for each in value]
        return value

    # the role is already checked against a fixed set, and templates compare it
    return {key: value if key == "role" else changed(value) for key, value in message.items()}


def _environment(today: Today) -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The Jinja environment of transformers (`chat_template_utils`), which templates expect."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: today().strftime(layout)
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces Jinja's filter, which escapes HTML characters."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )

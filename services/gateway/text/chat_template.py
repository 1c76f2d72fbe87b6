"""Renders chat messages to prompt text with the model's Jinja template.

A template writes role markers as special tokens, which the tokenizer converts to ids. If message
text were rendered unchanged, a client could forge a role by sending `<|im_start|>system`. So every
special token *inside text of the client* (contents, and the keys and values of tools) is replaced
by a reference (two Unicode noncharacters around a number) before the template runs, and `_split`
returns the parts: template text, where special tokens are recognized, and literal text, where the
same characters are ordinary. The model reads the client's text unchanged. Role markers that a model
writes with ordinary tokens cannot be distinguished from text; this is true of every server of such
a model.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.meta
import jinja2.sandbox
import msgspec

from shared.errors import ConfigError, InvalidRequest

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_REFERENCE = re.compile(f"{_OPEN}[0-9]+{_CLOSE}")

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
        self._references = {each: f"{_OPEN}{i}{_CLOSE}" for i, each in enumerate(literals)}
        self._literals = {reference: each for each, reference in self._references.items()}
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
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
    ) -> list[str]:
        """Returns the prompt parts in order; a `LiteralText` is text without special tokens.

        Raises InvalidRequest with the template's message if the template rejects the messages.
        """
        guarded = [self._guard_message(message) for message in messages]
        if tools and not self.takes_tools:
            raise InvalidRequest("this model's chat template does not support tools", param="tools")
        try:
            prompt = self._template.render(
                messages=guarded,
                tools=[self._guard_tree(tool) for tool in tools] or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        except jinja2.TemplateError as error:
            message = f"the chat template rejects these messages: {error}"
            raise InvalidRequest(message, param="messages") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            message = f"the chat template fails on these messages: {error}"
            raise InvalidRequest(message, param="messages") from error
        return self._split(prompt)

    def _guard_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        # the role is already checked against a fixed set, and templates compare it
        return {
            key: value if key == "role" else self._guard_tree(value)
            for key, value in message.items()
        }

    def _guard_tree(self, value: Any) -> Any:
        """The JSON value with every string guarded: templates render keys as they render values."""
        if isinstance(value, str):
            return self._guard(value)
        if isinstance(value, dict):
            return {self._guard(key): self._guard_tree(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self._guard_tree(each) for each in value]
        return value

    def _guard(self, text: str) -> str:
        return self._pattern.sub(lambda hit: self._references[hit[0]], text)

    def _split(self, prompt: str) -> list[str]:
        return [part for part in self._parts(prompt) if part]

    def _parts(self, prompt: str) -> Iterator[str]:
        """What only looks like a reference, because the template cut and joined texts, is text."""
        end = 0
        for hit in _REFERENCE.finditer(prompt):
            literal = self._literals.get(hit[0])
            if literal is not None:
                yield prompt[end : hit.start()]
                yield LiteralText(literal)
                end = hit.end()
        yield prompt[end:]


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

"""Renders chat messages to prompt text with the model's Jinja template.

A template writes role markers as special tokens, which the tokenizer converts to ids. If message
text were rendered unchanged, a client could forge a role by sending `<|im_start|>system`. So every
special token *inside text of the client* (contents, and the keys and values of tools) is replaced
by a reference (two Unicode noncharacters around a number) before the template runs, and `_split`
returns the parts: template text, where special tokens are recognized, and literal text, where the
same characters are ordinary. The model reads the client's text unchanged. The same is done for
markers, which are added tokens but not special ones, such as `<tool_call>`; only not in the content
of an answer, where templates look for them, as they do for special tokens around reasoning. Role
markers that a model writes with ordinary tokens cannot be distinguished from text; this is true of
every server of such a model.
"""

from __future__ import annotations

import datetime
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import jinja2
import jinja2.defaults
import jinja2.meta
import msgspec

from services.gateway.text.checkpoint.template_environment import Today, template_environment
from services.gateway.text.checkpoint.template_files import Templates
from services.gateway.text.history.argument_texts import with_argument_texts
from services.gateway.text.history.call_arguments import CallArguments
from services.gateway.text.history.call_ids import CallIds, with_call_ids
from services.gateway.text.history.content_parts import roles_with_parts, with_parts
from services.gateway.text.history.hermes import in_hermes_format
from services.gateway.text.history.late_system import (
    has_late_system,
    with_late_system_as_user,
    writes_in_place,
)
from services.gateway.text.history.single_calls import (
    has_several_calls,
    has_text_beside_reasoning,
    rejects_text_beside_reasoning,
    with_single_calls,
    with_text_in_reasoning,
    writes_one_call,
)
from shared.errors import ConfigError, InvalidRequest
from shared.transport.wire_errors import one_line

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
MAX_REASON_CHARS = 500
NO_TEMPLATE = (
    "this model has no chat template: use /v1/completions, or give it one with --chat-template FILE"
)
_REFERENCE = re.compile(f"{_OPEN}[0-9]+{_CLOSE}")

# A template that compares a content with none expects none beside calls; others expect a text.
_NULL_CONTENT = re.compile(r"""(?<![\w])content['"\]]*\s+is\s+(not\s+)?none""", re.IGNORECASE)
_TEXT_OF_PART = re.compile(r"""(\.|\[\s*['"])text\b""")
_THINKING = re.compile(r"""message(\.|\[['"])thinking\b""")
_REASONING = re.compile(r"[<\[]/?(think|thinking|thought|reasoning)[>\]]", re.IGNORECASE)
_EMPTY: Mapping[str, Any] = {}

# Variables that a client cannot set: what the gateway passes, and what templates call.
RESERVED_VARIABLES = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("raise_exception", "strftime_now", "chat_template", "tokenize", "loop", "self"),
        *jinja2.defaults.DEFAULT_NAMESPACE,
    }
)
TOKEN_VARIABLE = "_token"  # end of the names of special tokens

ToolFormat = Literal["template", "hermes"]


class LiteralText(str):
    """A prompt part in which special tokens are ordinary text."""

    __slots__ = ()


class TemplateSource(msgspec.Struct, frozen=True):
    """A template as text, and what compiling it needs. Compiling runs the template's constants.

    `call_ids`: the form of ids that the template requires. `tool_format`: how tools are given to a
    template that knows none; by default such a request is rejected. `for_tools`: the template of
    conversations with tools, if it is another.
    """

    source: str
    special_tokens: tuple[str, ...]
    variables: dict[str, str]
    markers: tuple[str, ...] = ()
    call_ids: CallIds = "own"
    tool_format: ToolFormat = "template"
    for_tools: str | None = None

    @property
    def text(self) -> str:
        """The text of both templates."""
        return Templates(self.source, self.for_tools).text

    def compiled(self) -> ChatTemplate:
        return ChatTemplate(
            self.source,
            special_tokens=self.special_tokens,
            variables=self.variables,
            markers=self.markers,
            call_ids=self.call_ids,
            tool_format=self.tool_format,
            for_tools=self.for_tools,
        )


class ChatTemplate:
    """Renders conversations with a compiled template. Raises ConfigError if it does not compile."""

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Sequence[str],
        variables: Mapping[str, str],
        markers: Sequence[str] = (),
        today: Today = datetime.datetime.now,
        call_ids: CallIds = "own",
        tool_format: ToolFormat = "template",
        for_tools: str | None = None,
    ) -> None:
        self.source = TemplateSource(
            source, tuple(special_tokens), dict(variables), tuple(markers), call_ids, tool_format
        )
        self._for_tools: ChatTemplate | None = None
        if for_tools is not None:
            self._for_tools = ChatTemplate(
                for_tools,
                special_tokens=special_tokens,
                variables=variables,
                markers=markers,
                today=today,
                call_ids=call_ids,
                tool_format=tool_format,
            )
        literals = _longest_first(special_tokens, markers)
        self._references = {each: f"{_OPEN}{i}{_CLOSE}" for i, each in enumerate(literals)}
        self._literals = {reference: each for each, reference in self._references.items()}
        self._pattern = _any_of(literals)
        roles = [each for each in special_tokens if not _is_split_off(each, source)]
        self._pattern_in_answers = _any_of(_longest_first(roles))
        self._variables = dict(variables)
        try:
            environment = template_environment(today)
            self._template = environment.from_string(source)
            names = jinja2.meta.find_undeclared_variables(environment.parse(source))
            has_tools = "tools" in names
            self.takes_tools = has_tools or self._for_tools is not None
            self._takes_calls = has_tools or "tool_calls" in source
            self._has_xml_arguments = "<parameter=" in source or "<arg_value>" in source
            self._has_null_content = _NULL_CONTENT.search(source) is not None
            self._has_thinking = _THINKING.search(source) is not None
        except Exception as error:  # constants of the template are computed, which may raise any
            raise ConfigError(f"the chat template does not compile: {one_line(error)}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] = _EMPTY,
    ) -> list[str]:
        """Returns the prompt parts in order; a `LiteralText` is text without special tokens.
        `variables`: of the client, such as `enable_thinking`.

        Raises InvalidRequest with the template's message if the template rejects the messages.
        """
        if self._for_tools is not None and self._needs_other(messages, tools):
            return self._for_tools.render(
                messages, tools, add_generation_prompt=add_generation_prompt, variables=variables
            )
        messages, tools = self._with_known_tools(messages, tools)
        if has_late_system(messages) and not self._writes_late_system:
            messages = with_late_system_as_user(messages)
        if has_several_calls(messages) and self._writes_one_call:
            messages = with_single_calls(messages)
        if has_text_beside_reasoning(messages) and self._rejects_text_beside_reasoning:
            messages = with_text_in_reasoning(messages)
        messages = with_call_ids(messages, self.source.call_ids)
        if self._has_xml_arguments:
            messages = with_argument_texts(messages, tools)
        context: dict[str, Any] = {
            **{name: self._guard_tree(value) for name, value in variables.items()},
            **self._variables,
            "messages": with_parts(
                list(map(self._guard_message, messages)), self._roles_with_parts
            ),
            "tools": [self._guard_tree(tool) for tool in tools] or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            prompt = self._template.render(context)
        except jinja2.TemplateError as error:
            message = f"the chat template rejects these messages: {_short(error)}"
            raise InvalidRequest(message, param="messages") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            message = f"the chat template fails on these messages: {_short(error)}"
            raise InvalidRequest(message, param="messages") from error
        return self._split(prompt)

    @cached_property
    def _writes_late_system(self) -> bool:
        """Returns whether the template writes a system message after the first in its place.
        Renders once.
        """
        return writes_in_place(self._try)

    @cached_property
    def _writes_one_call(self) -> bool:
        """Returns whether the template leaves out all calls of a message but one. Renders once."""
        return writes_one_call(self._try)

    @cached_property
    def _rejects_text_beside_reasoning(self) -> bool:
        """Returns whether the template takes no text beside reasoning before a call. Renders twice
        at most.
        """
        return self._has_thinking and rejects_text_beside_reasoning(self._try)

    def _try(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Returns the text of known messages. Raises ValueError if the template rejects them."""
        try:
            return self._probe(with_parts(messages, self._roles_with_parts))
        except (jinja2.TemplateError, TypeError, LookupError, AttributeError) as error:
            raise ValueError("the template rejects the messages") from error

    @cached_property
    def _roles_with_parts(self) -> frozenset[str]:
        """Returns the roles whose contents the template expects as lists. Renders several times."""
        reads_parts = _TEXT_OF_PART.search(self.source.source) is not None
        return roles_with_parts(self._probe) if reads_parts else frozenset()

    def _probe(self, messages: Sequence[Mapping[str, Any]]) -> str:
        context = {**self._variables, "messages": messages, "add_generation_prompt": False}
        return self._template.render(context)

    def _needs_other(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> bool:
        """Returns whether the conversation needs the other template, also for earlier calls, which
        this one would omit.
        """
        return bool(tools) or (not self._takes_calls and any(map(_is_of_tools, messages)))

    def _with_known_tools(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
        """Returns tools, calls and results in a form that the template renders, else as text.
        Raises InvalidRequest.
        """
        if tools and not self.takes_tools:
            unknown = "tools"
        elif not self._takes_calls and any(_is_of_tools(each) for each in messages):
            unknown = "messages"
        else:
            return messages, tools
        if self.source.tool_format == "hermes":
            return in_hermes_format(messages, tools), ()
        raise InvalidRequest("this model's chat template does not support tools", param=unknown)

    def _guard_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        # the role is already checked against a fixed set, and templates compare it
        guarded = {
            key: value if key == "role" else self._guard_tree(value)
            for key, value in message.items()
            if key != "tool_calls"
        }
        content = message.get("content")
        if message["role"] == "assistant" and isinstance(content, str):
            guarded["content"] = self._guard(content, self._pattern_in_answers)
        calls = message.get("tool_calls")
        if calls:
            guarded["tool_calls"] = [self._guard_call(call) for call in calls]
            if self._has_null_content and not message["content"]:
                guarded["content"] = None
        if self._has_thinking and "reasoning_content" in guarded:
            guarded["thinking"] = guarded["reasoning_content"]
        return guarded

    def _guard_call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Parses the arguments, which templates expect as a mapping."""
        text = call["function"]["arguments"]
        guarded = self._guard_tree(call)
        values = self._guard_tree(json.loads(text))
        guarded["function"]["arguments"] = CallArguments(values, self._guard(text))
        assert isinstance(guarded, dict)
        return guarded

    def _guard_tree(self, value: Any) -> Any:
        """Guards every string of a JSON value: templates render keys as they render values."""
        if isinstance(value, str):
            return self._guard(value)
        if isinstance(value, dict):
            return {self._guard(key): self._guard_tree(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self._guard_tree(each) for each in value]
        return value

    def _guard(self, text: str, pattern: re.Pattern[str] | None = None) -> str:
        return (pattern or self._pattern).sub(lambda hit: self._references[hit[0]], text)

    def _split(self, prompt: str) -> list[str]:
        return [part for part in self._parts(prompt) if part]

    def _parts(self, prompt: str) -> Iterator[str]:
        """Splits the rendered text at references. Text that only resembles a reference, because the
        template cut and joined texts, stays text.
        """
        end = 0
        for hit in _REFERENCE.finditer(prompt):
            literal = self._literals.get(hit[0])
            if literal is not None:
                yield prompt[end : hit.start()]
                yield LiteralText(literal)
                end = hit.end()
        yield prompt[end:]


def _longest_first(*tokens: Sequence[str]) -> list[str]:
    """Returns the texts of a pattern in which a token wins over its prefixes, with a reference's
    marks.
    """
    return sorted({*itertools.chain(*tokens), _OPEN, _CLOSE}, key=len, reverse=True)


def _any_of(literals: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(each) for each in literals))


def _is_split_off(token: str, source: str) -> bool:
    """Returns whether this special token encloses reasoning, which the template removes from
    answers.
    """
    return _REASONING.fullmatch(token) is not None and token in source


def _is_of_tools(message: Mapping[str, Any]) -> bool:
    return message.get("role") == "tool" or bool(message.get("tool_calls"))


def _short(error: Exception) -> str:
    """Returns the start of the error's message, which a template may make of any length."""
    return str(error)[:MAX_REASON_CHARS]

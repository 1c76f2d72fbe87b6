"""Parses JSON bodies of calls while they arrive: the name first, then the arguments' text.

arguments: one object, the arguments of the call that the opening marker names
calls:     {"name": …, "arguments": {…}}, alone, in a list, or joined by a separator
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from services.gateway.structured.tools.parsing.json_value import SPACE, JsonValue
from services.gateway.structured.tools.parsing.response_template import TemplateRegion

MAX_NAME_CHARS = 1024


class CallReceiver(Protocol):
    def start(self, name: str) -> None: ...

    def arguments(self, text: str) -> None: ...

    def end(self) -> None: ...


class ArgumentsBody:
    """A body of arguments. `name` is the call's, which is an offered tool's. `feed` returns the
    index after the part of the text that belongs to the body.
    """

    def __init__(self, name: str, receiver: CallReceiver) -> None:
        self.is_complete = False
        self.is_bad = False
        self._name = name
        self._receiver = receiver
        self._value: JsonValue | None = None

    def feed(self, text: str, start: int) -> int:
        index = start
        if self._value is None:
            index = _after_space(text, index)
            if index == len(text):
                return index
            if text[index] != "{":
                self.is_bad = True
                return index
            self._value = JsonValue()
            self._receiver.start(self._name)
        end = self._value.feed(text, index)
        if end > index:
            self._receiver.arguments(text[index:end])
        self.is_bad, self.is_complete = self._value.is_bad, self._value.is_complete
        if self.is_complete:
            self._receiver.end()
        return end


class CallsBody:
    """A body of calls. `is_offered` returns whether a name is one of the tools. `has_ended_call` is
    true if the last `feed` ended a call.
    """

    def __init__(
        self,
        receiver: CallReceiver,
        is_offered: Callable[[str], bool],
        *,
        name_key: str,
        arguments_keys: tuple[str, ...],
        separator: str = "",
    ) -> None:
        self.is_complete = False
        self.is_bad = False
        self.has_ended_call = False
        self._receiver = receiver
        self._is_offered = is_offered
        self._name_key, self._arguments_keys = name_key, arguments_keys
        self._separator = separator
        self._is_list = False
        self._expected = "body"
        self._value = JsonValue()
        self._text = ""  # text of the key or value that is being read, unless it is passed on
        self._key = ""
        self._begin_call()

    def feed(self, text: str, start: int) -> int:
        """Parses until the end of the text, of the body or of a call. Returns the index after the
        parsed part.
        """
        index, end = start, len(text)
        self.has_ended_call = False
        while index < end and not (self.is_complete or self.is_bad or self.has_ended_call):
            index = self._step(text, index)
        return index

    @property
    def has_whole_arguments(self) -> bool:
        """Whether the open call has its name and complete arguments."""
        return self._name is not None and self._has_arguments

    def finish(self) -> None:
        """Ends the body at the end of the text: no separator follows."""
        if self._expected == "separator":
            self.is_complete = True

    def _begin_call(self) -> None:
        self._name: str | None = None
        self._has_arguments = False
        self._is_passed_on = False
        self._held = ""  # arguments before the name

    def _step(self, text: str, index: int) -> int:
        if self._expected in ("key", "value"):
            return self._in_value(text, index)
        char = text[index]
        if char in SPACE:
            return index + 1
        if self._expected == "separator" and char != self._separator:
            self.is_complete = True
            return index
        self._structure(char)
        if self.is_bad:
            return index
        return index if self._expected in ("key", "value") else index + 1

    def _structure(self, char: str) -> None:
        """Handles a character of the structure. The first character of a key or value is read
        again.
        """
        match self._expected, char:
            case "body", "[":
                self._is_list, self._expected = True, "object"
            case (("body" | "object" | "next object"), "{"):
                self._begin_call()
                self._expected = "key start or end"
            case "object", "]":
                self.is_complete = True
            case (("key start or end" | "key start"), '"'):
                self._begin_value("key")
            case "colon", ":":
                self._expected = "value start"
            case "value start", _:
                self._begin_value("value")
                is_arguments = self._key in self._arguments_keys
                self.is_bad = is_arguments and (char != "{" or self._has_arguments)
            case "comma or end", ",":
                self._expected = "key start"
            case "comma or end", "}":
                self._end_call()
            case "next or end", ",":
                self._expected = "next object"
            case "next or end", "]":
                self.is_complete = True
            case "separator", _:
                self._expected = "next object"
            case _:
                self.is_bad = True

    def _begin_value(self, expected: str) -> None:
        self._expected, self._value, self._text = expected, JsonValue(), ""

    def _in_value(self, text: str, index: int) -> int:
        end = self._value.feed(text, index)
        chunk = text[index:end]
        is_value = self._expected == "value"
        if is_value and self._key in self._arguments_keys:
            self._pass_on(chunk)
        elif not is_value or self._key == self._name_key:
            self._text += chunk
            self.is_bad = len(self._text) > MAX_NAME_CHARS
        self.is_bad = self.is_bad or self._value.is_bad
        if self._value.is_complete and not self.is_bad:
            self._end_value()
        return end

    def _end_value(self) -> None:
        if self._expected == "key":
            self._key, self._expected = _string(self._text) or "", "colon"
            return
        self._expected = "comma or end"
        if self._key in self._arguments_keys:
            self._has_arguments = True
        elif self._key == self._name_key:
            name = _string(self._text)
            if name is None or self._name is not None or not self._is_offered(name):
                self.is_bad = True
                return
            self._name = name
            if self._held:
                self._pass_on("")

    def _pass_on(self, chunk: str) -> None:
        if self._name is None:
            self._held += chunk
            return
        if not self._is_passed_on:
            self._is_passed_on = True
            self._receiver.start(self._name)
        text, self._held = self._held + chunk, ""
        if text:
            self._receiver.arguments(text)

    def _end_call(self) -> None:
        if self._name is None:
            self.is_bad = True
            return
        if not self._has_arguments:
            self._pass_on("{}")
        self._receiver.end()
        self.has_ended_call = True
        self._begin_call()
        if self._is_list:
            self._expected = "next or end"
        elif self._separator:
            self._expected = "separator"
        else:
            self.is_complete = True


def body_of(
    region: TemplateRegion,
    name: str | None,
    receiver: CallReceiver,
    is_offered: Callable[[str], bool],
) -> ArgumentsBody | CallsBody:
    """Returns the parser of a region's body. `name` is the call's if the opening contains it."""
    if name is not None and region.has_arguments_only:
        return ArgumentsBody(name, receiver)
    return CallsBody(
        receiver,
        is_offered,
        name_key=region.name[-1],
        arguments_keys=tuple(dict.fromkeys((region.arguments[-1], "arguments", "parameters"))),
        separator=region.args.get("separator", ""),
    )


def _after_space(text: str, index: int) -> int:
    while index < len(text) and text[index] in SPACE:
        index += 1
    return index


def _string(text: str) -> str | None:
    try:
        return msgspec.json.decode(text, type=str)
    except (msgspec.DecodeError, UnicodeError):
        return None

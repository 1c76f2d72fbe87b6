"""Finds the end of a JSON value in a text that arrives in parts, and its first invalid character.

value ──"{"──▶ key or end ──▶ colon ──▶ value ──▶ comma or end ──▶ …, one level for each bracket
"""

from __future__ import annotations

import re

import msgspec

from shared.transport.wire_errors import UNREADABLE

SPACE = " \t\n\r"
MAX_DEPTH = 128
_STRING_STOP = re.compile(r'["\\\x00-\x1f\ud800-\udfff]')
_LINE_END = re.compile(r"[\r\n]")  # between values: strings have it escaped
_LITERAL_END = re.compile(r"[^0-9a-zA-Z+\-.]")
_LITERAL = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_ESCAPES = '"\\/bfnrt'
_HEX = "0123456789abcdefABCDEF"
MAX_LITERAL_CHARS = 1024


def json_object(text: str) -> msgspec.Raw | None:
    """Returns the JSON object that the text is, on one line, or None for another text. An object
    that has what JSON allows and Python's types do not, such as 1e400 or half of a surrogate pair,
    is returned as it is written.
    """
    try:
        values = msgspec.json.decode(text)
    except UNREADABLE:
        bare, value = text.strip(SPACE), JsonValue()
        is_object = bare.startswith("{") and value.feed(bare) == len(bare) and value.is_complete
        return msgspec.Raw(_LINE_END.sub(" ", bare).encode()) if is_object else None
    return msgspec.Raw(msgspec.json.encode(values)) if isinstance(values, dict) else None


class JsonValue:
    """The parser of one value. Once true, `is_complete` and `is_bad` stay true."""

    def __init__(self) -> None:
        self.is_complete = False
        self.is_bad = False
        self._brackets: list[str] = []
        self._expected = "value"
        self._literal = ""
        self._num_hex = 0  # remaining digits of \uXXXX

    def feed(self, text: str, start: int = 0) -> int:
        """Returns the index after the last valid character: the value's end, the first invalid
        character, or the text's end.
        """
        index, end = start, len(text)
        while index < end and not (self.is_complete or self.is_bad):
            index = self._step(text, index)
        return index

    def finish(self) -> None:
        """Ends a number at the end of the text."""
        if self._expected == "literal" and not self.is_bad:
            self._end_literal()

    def _step(self, text: str, index: int) -> int:
        match self._expected:
            case "string" | "key":
                return self._in_string(text, index)
            case "escape" | "key escape":
                return self._in_escape(text[index], index)
            case "literal":
                return self._in_literal(text, index)
        char = text[index]
        if char in SPACE:
            return index + 1
        self._structure(char)
        return index if self.is_bad else index + 1

    def _structure(self, char: str) -> None:
        expected = self._expected
        if expected in ("value", "value or end"):
            if char == "]" and expected == "value or end":
                self._close()
            else:
                self._open(char)
        elif expected in ("key start", "key or end"):
            if char == '"':
                self._expected = "key"
            elif char == "}" and expected == "key or end":
                self._close()
            else:
                self.is_bad = True
        elif expected == "colon":
            self._expected, self.is_bad = "value", char != ":"
        elif char == ",":
            self._expected = "key start" if self._brackets[-1] == "}" else "value"
        elif char == self._brackets[-1]:
            self._close()
        else:
            self.is_bad = True

    def _open(self, char: str) -> None:
        if char == '"':
            self._expected = "string"
        elif char in "{[" and len(self._brackets) < MAX_DEPTH:
            self._brackets.append("}" if char == "{" else "]")
            self._expected = "key or end" if char == "{" else "value or end"
        elif char in "-0123456789tfn":
            self._expected, self._literal = "literal", char
        else:
            self.is_bad = True

    def _close(self) -> None:
        self._brackets.pop()
        self._end_value()

    def _end_value(self) -> None:
        self._expected = "comma or end"
        self.is_complete = not self._brackets

    def _in_string(self, text: str, index: int) -> int:
        found = _STRING_STOP.search(text, index)
        if found is None:
            return len(text)
        if found[0] == '"':
            if self._expected == "key":
                self._expected = "colon"
            else:
                self._end_value()
        elif found[0] == "\\":
            self._expected = "key escape" if self._expected == "key" else "escape"
        else:
            self.is_bad = True
            return found.start()
        return found.end()

    def _in_escape(self, char: str, index: int) -> int:
        is_hex = self._num_hex > 0
        if is_hex and char in _HEX:
            self._num_hex -= 1
        elif not is_hex and char == "u":
            self._num_hex = 4
        elif is_hex or char not in _ESCAPES:
            self.is_bad = True
            return index
        if not self._num_hex:
            self._expected = "key" if self._expected == "key escape" else "string"
        return index + 1

    def _in_literal(self, text: str, index: int) -> int:
        found = _LITERAL_END.search(text, index)
        end = len(text) if found is None else found.start()
        self._literal += text[index:end]
        if len(self._literal) > MAX_LITERAL_CHARS:
            self.is_bad = True
        elif found is not None:
            self._end_literal()
        return end

    def _end_literal(self) -> None:
        if _LITERAL.fullmatch(self._literal):
            self._end_value()
        else:
            self.is_bad = True

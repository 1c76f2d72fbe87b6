"""Text and markers in llguidance's Lark."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import msgspec

from shared.errors import InvalidRequest

TokenIdOf = Callable[[str], int | None]  # the token of a marker that is one, else None

# Characters that need no escape in a string of JSON or Python.
UNESCAPED = r'/[^"\\\x00-\x1f\x7f]*/'

_TOKEN = re.compile(
    r"""(?P<comment>(?://|\#)[^\n]*)
    |(?P<text>"(?:[^"\\\n]|\\.)*")(?P<flag>i?)(?P<range>\s*\.\.)?
    |(?P<regex>/(?:[^/\\\n]|\\.)+/[imslux]*)
    |(?P<refused>%(?!ignore)\w+|~(?!\s*\d)|<[^>\n]*>|[@&][\w-]*|["/<])""",
    re.VERBOSE,
)


def literal(text: str) -> str:
    """Returns the text as a string of Lark: JSON's form, except for one character that Lark
    rejects.
    """
    return msgspec.json.encode(text).decode().replace("\x7f", "\\u007f")


def marker(text: str, token_id_of: TokenIdOf) -> str:
    """Returns a marker of a model's format in Lark: its token, or its text."""
    token_id = token_id_of(text)
    return literal(text) if token_id is None else f"<[{token_id}]>"


def any_of(expressions: Iterable[str]) -> str:
    return f"({' | '.join(expressions)})"


def in_slashes(expression: str) -> str:
    """Returns an expression between slashes, with escaped newlines and bare slashes, which would
    end it.
    """
    escaped, is_escaped = [], False
    for char in expression.replace("\n", "\\n"):
        escaped.append("\\/" if char == "/" and not is_escaped else char)
        is_escaped = char == "\\" and not is_escaped
    return f"/{''.join(escaped)}/"


def in_string(grammar: str, param: str) -> str:
    """Returns the grammar of the same texts inside a quoted string: literals are escaped, and
    expressions match only text that needs no escape. Escaping works character by character, so the
    result matches the escaped forms of what the grammar matches.

    Raises InvalidRequest for constructs that cannot be translated: `%` directives except `%ignore`,
    `~`, `&`, special tokens, ranges, the flag `i` of a text with escapes, and unclosed texts. Takes
    linear time: the first unclosed text ends it.
    """
    terminals: dict[str, str] = {}

    def translated(found: re.Match[str]) -> str:
        if found["comment"] is not None:
            return ""
        if found["regex"] is not None:
            name = f"IN_STRING_{len(terminals)}"
            return terminals.setdefault(found["regex"], name)
        escaped = "" if found["text"] is None else _escaped_twice(found["text"], param)
        changes = escaped != found["text"]
        if found["text"] is None or found["range"] or (found["flag"] and changes):
            raise InvalidRequest(
                f"{param}: {found[0]} is not supported in the input of a tool", param=param
            )
        return escaped + found["flag"]

    rules = _TOKEN.sub(translated, grammar)
    lines = (f"{name}: {regex} & {UNESCAPED}" for regex, name in terminals.items())
    return "\n".join([rules, *lines])


def _escaped_twice(text: str, param: str) -> str:
    try:
        value = msgspec.json.decode(text, type=str)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"{param}: {text} is not a string: {error}", param=param) from None
    return literal(literal(value)[1:-1])

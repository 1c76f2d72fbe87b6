"""Parses bodies of calls that are complete. All functions raise ValueError for invalid bodies."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any

import regex

from services.gateway.schemas.argument_text import ArgumentKinds, read
from services.gateway.structured.tools.parsing.response_template import TemplateRegion

MAX_BODY_CHARS = 256 * 1024  # each token copies the held text
MATCH_TIMEOUT_S = 0.05
_UNQUOTED_KEY = regex.compile(r"([{,]\s*)([^\s\"{}\[\],:]+)\s*:")
_WORDS = {"true": True, "false": False, "null": None}


def whole_calls(
    region: TemplateRegion,
    body: str,
    captures: Mapping[str, str],
    schemas: Mapping[str, Mapping[str, Any]],
) -> list[tuple[str, str]]:
    """Returns the names and the arguments, as JSON, of a body's calls to tools that have a schema.
    `captures` are the named groups of the opening.
    """
    try:
        calls = _named(region, _content(region, body, captures, schemas), captures)
        texts = [
            (name, json.dumps(values, ensure_ascii=False, allow_nan=False))
            for name, values in calls
        ]
        for name, text in texts:
            text.encode()  # fails for a lone surrogate
            if name not in schemas:
                raise ValueError(f"no tool is named {name}")
    except (KeyError, TypeError, AttributeError, RecursionError, TimeoutError) as error:
        raise ValueError(f"not calls: {error}") from error
    return texts


def _content(
    region: TemplateRegion,
    body: str,
    captures: Mapping[str, str],
    schemas: Mapping[str, Mapping[str, Any]],
) -> Any:
    match region.content:
        case "python-calls":
            return python_calls(body)
        case "xml-inline":
            return xml_parameters(body, region.args, schemas[captures[region.name[0]]])
    return lax_json(body, region.args)


def _named(
    region: TemplateRegion, content: Any, captures: Mapping[str, str]
) -> list[tuple[str, dict[str, Any]]]:
    calls = []
    for scope in content if region.is_list else [{"content": content}]:
        values = {**captures, **scope}
        name, arguments = _at(values, region.name), _at(values, region.arguments)
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise ValueError("not a name and its arguments")
        calls.append((name, arguments))
    return calls


def _at(values: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        values = values[key]
    return values


def lax_json(text: str, args: Mapping[str, Any]) -> Any:
    """Decodes JSON with strings between other marks and keys without quotes."""
    if "\x00" in text:
        raise ValueError("NUL in a call")
    strings: list[str] = []
    for opening, close in args.get("string_delims", ()):
        parts = text.split(opening) if opening == close else _between(text, opening, close)
        if len(parts) % 2 == 0:
            raise ValueError(f"a string has no closing {close!r}")
        for index in range(1, len(parts), 2):
            strings.append(parts[index])
            parts[index] = f'"\x00{len(strings) - 1}"'
        text = "".join(parts)
    if args.get("unquoted_keys"):
        text = _UNQUOTED_KEY.sub(r'\1"\2":', text, timeout=MATCH_TIMEOUT_S)
    value = json.JSONDecoder(strict=False, parse_constant=_no_constant).decode(text.strip())
    return _restored(value, strings)


def _between(text: str, opening: str, close: str) -> list[str]:
    """Returns the texts outside and inside the marks, alternately."""
    parts = []
    for index, part in enumerate(text.split(opening)):
        parts += part.split(close, 1) if index else [part]
    return parts


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _restored(value: Any, strings: Sequence[str]) -> Any:
    match value:
        case str() if value.startswith("\x00"):
            return strings[int(value[1:])]
        case dict():
            return {
                _restored(key, strings): _restored(each, strings) for key, each in value.items()
            }
        case list():
            return [_restored(each, strings) for each in value]
    return value


def xml_parameters(text: str, args: Mapping[str, Any], schema: Mapping[str, Any]) -> Any:
    """Returns an object of the tags, with values of the kinds that the schema of the arguments
    allows.
    """
    kinds = ArgumentKinds(schema)
    found: dict[str, Any] = {}
    end = 0
    for tag in regex.finditer(
        args["tag_pattern"], text, flags=regex.DOTALL, timeout=MATCH_TIMEOUT_S
    ):
        if text[end : tag.start()].strip():
            raise ValueError("text between parameters")
        end = tag.end()
        found[tag["key"]] = read(tag["value"], kinds[tag["key"]])
    if text[end:].strip():
        raise ValueError("text after the parameters")
    return found


def python_calls(text: str) -> list[dict[str, Any]]:
    """Returns `[f(a='x'), g(b=1)]` as names and arguments. Only literals are allowed."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        if not isinstance(tree, ast.List):
            raise ValueError("not a list")
        return [_python_call(each) for each in tree.elts]
    except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(f"not a list of calls: {error}") from error


def _python_call(node: ast.expr) -> dict[str, Any]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with named arguments")
    arguments = {}
    for each in node.keywords:
        if each.arg is None:
            raise ValueError("** is not a named argument")
        arguments[each.arg] = _literal(each.value)
    return {"name": ast.unparse(node.func), "arguments": arguments}


def _literal(node: ast.expr) -> Any:
    """Returns a literal's value; `true`, `false` and `null` are read as JSON's."""
    match node:
        case ast.Name(id=("true" | "false" | "null") as word):
            return _WORDS[word]
        case ast.List(elts=items):
            return [_literal(each) for each in items]
        case ast.Dict(keys=keys, values=values):
            pairs = zip(keys, values, strict=True)
            return {str(_literal(key)): _literal(value) for key, value in pairs if key is not None}
    return ast.literal_eval(node)

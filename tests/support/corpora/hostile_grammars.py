"""Constraints that are made to hurt: each is answered soon, and hurts nobody else.

A case is the members of a chat request as JSON text, since some of them are no JSON.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

KIB = 1024


@dataclass(frozen=True)
class Hostile:
    """A request with a grammar made to harm the gateway.

    `members` are members of the request's JSON body, without braces. If `is_refused`, the gateway
    must refuse it with status 400, or 413 if the body is too large; else it may also answer it.
    """

    name: str
    members: bytes
    is_refused: bool = True


def hostile_grammars() -> list[Hostile]:
    return [*_references(), *_schemas(), *_sizes(), *_texts(), *_regexes(), *_grammars(), *_tools()]


def _case(name: str, is_refused: bool = True, **fields: Any) -> Hostile:
    return Hostile(name, json.dumps(fields)[1:-1].encode(), is_refused)


def _schema(name: str, schema: Any, is_refused: bool = True) -> Hostile:
    constraint = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    return _case(name, is_refused, response_format=constraint)


def _raw_schema(name: str, schema: bytes, is_refused: bool = True) -> Hostile:
    head = b'"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":'
    return Hostile(name, head + schema + b"}}", is_refused)


def _object(**properties: Any) -> dict[str, Any]:
    required = [*properties]
    return {"type": "object", "properties": properties, "required": required}


def _tagged(number: int) -> dict[str, Any]:
    return _object(**{f"p{number}": {}})


def _references() -> list[Hostile]:
    loop = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}
    endless = {"a": _object(a={"$ref": "#/$defs/a"})}
    doubling = {
        f"a{n}": {"allOf": [{"$ref": f"#/$defs/a{n + 1}"}, {"$ref": f"#/$defs/a{n + 1}"}]}
        for n in range(24)
    }
    wide = {
        f"a{n}": _object(a={"$ref": f"#/$defs/a{n + 1}"}, b={"$ref": f"#/$defs/a{n + 1}"})
        for n in range(30)
    }
    row = {f"a{n}": {"$ref": f"#/$defs/a{n + 1}"} for n in range(2000)}
    first, last = {"$ref": "#/$defs/a0"}, {"type": "string", "maxLength": 3}
    return [
        _schema("itself", {"$ref": "#"}),
        _schema("two that refer to each other", {"$ref": "#/$defs/a", "$defs": loop}),
        _schema("an object that needs itself", {"$ref": "#/$defs/a", "$defs": endless}, False),
        _schema("remote", {"$ref": "http://127.0.0.1:1/schema.json"}),
        _schema("metadata service", {"$ref": "http://169.254.169.254/latest/meta-data"}),
        _schema("local file", {"$ref": "file:///etc/passwd"}),
        _schema("missing", {"$ref": "#/$defs/missing"}),
        _schema("path traversal", {"$ref": "#/../../../etc/passwd"}),
        _schema("no text", {"$ref": 5}),
        _schema("doubled 24 times", first | {"$defs": doubling | {"a24": last}}, False),
        _schema("2^30 documents", first | {"$defs": wide | {"a30": last}}, False),
        _schema("2,000 in a row", first | {"$defs": row | {"a2000": last}}, False),
        _schema("$id of elsewhere", {"$id": "http://127.0.0.1:1/", "$ref": "other.json"}),
        _schema("unknown $schema", {"$schema": "http://127.0.0.1:1/", "type": "string"}, False),
    ]  # fmt: skip


def _schemas() -> list[Hostile]:
    letters = [{"type": "string", "pattern": f"^{a}.{{1,900}}$"} for a in "abcdefgh"]
    bomb = {"allOf": [{"anyOf": letters} for _ in range(12)]}
    objects = [
        {"anyOf": [_object(**{f"p{n}{m}": {"type": "string"}}) for m in range(8)]} for n in range(8)
    ]
    contradiction = {"allOf": [{"type": "string"}, {"type": "integer"}]}
    return [
        _schema("allOf of anyOf of patterns", bomb),
        _schema("8^8 merged objects", {"allOf": objects}, False),
        _schema("allOf of 5,000", {"allOf": [{"type": "string"}] * 5000}, False),
        _schema("anyOf of 5,000", {"anyOf": [{"const": n} for n in range(5000)]}, False),
        _schema("oneOf of 300 objects", {"oneOf": [*map(_tagged, range(300))]}, False),
        _schema("contradiction", contradiction),
        _schema("empty enum", {"enum": []}),
        _schema("crossed bounds of items", {"type": "array", "minItems": 3, "maxItems": 2}),
        _schema("crossed bounds", {"type": "integer", "minimum": 5, "maximum": 3}),
        _schema("impossible member", {**_object(z={}), "properties": {"z": False}}),
        _schema("unknown type", {"type": "text"}),
        _schema("type of types", {"type": {"type": "string"}}),
        _schema("properties as list", {"properties": [1]}),
        _schema("false", False),
        _schema("number", 5),
        _schema("null", False),
        _schema("empty list", []),
        _schema("bad pattern", {"type": "string", "pattern": "["}),
        _schema("slow pattern", {"type": "string", "pattern": "^(a{1000}){1000}$"}),
        _schema("slow name", {"patternProperties": {"^(a{99}){999}$": {}}}, False),
        _schema("a million items", {"type": "array", "items": {}, "minItems": 10**6}, False),
        _schema("length of 10^9", {"type": "string", "minLength": 10**9}, False),
        _schema("length of 10^30", {"type": "string", "maxLength": 10**30}, False),
        _schema("negative length", {"type": "string", "minLength": -1}, False),
        _schema("10^6 properties", {"type": "object", "minProperties": 10**6}, False),
        _schema("multiple of 10^-300", {"type": "number", "multipleOf": 1e-300}, False),
        _schema("multiple of zero", {"type": "number", "multipleOf": 0}, False),
        _schema("integers of 300 digits", {"type": "integer", "minimum": 10**300}, False),
        _schema("bounds of infinity", {"type": "number", "minimum": 1e308}, False),
        _schema("own options", {"type": "string", "x-guidance": {"lenient": True}}, False),
        _schema("own whitespace", {"x-guidance": {"whitespace_pattern": "(a{999}){999}"}}, False),
    ]  # fmt: skip


def _sizes() -> list[Hostile]:
    """Depth, width and bytes."""
    deep, deeper = 120, 20_000
    names = _object(**{f"property_{n}": {"type": "integer"} for n in range(2000)})
    return [
        _raw_schema(f"{deep} levels", b'{"items":' * deep + b"{}" + b"}" * deep, False),
        _raw_schema(f"{deeper} levels", b'{"items":' * deeper + b"{}" + b"}" * deeper),
        _raw_schema(f"{deeper} lists", b"[" * deeper + b"]" * deeper),
        _raw_schema("never closed", b'{"items":' * 3000),
        _schema("100,000 values", {"enum": [f"{n:06}" for n in range(100_000)]}),
        _schema("2,000 members", names, False),
        _schema("a constant of 200 KiB", {"const": "a" * 200 * KIB}, False),
        _schema("1 MiB", {"const": "a" * 1024 * KIB}),
        _schema("1 MiB of description", {"description": "a" * 1024 * KIB}, False),
    ]


def _texts() -> list[Hostile]:
    """Returns schemas with invalid or unusual Unicode."""
    return [
        _raw_schema("invalid UTF-8", b'{"const":"\xff\xfe"}'),
        _raw_schema("half a surrogate", rb'{"const":"\ud800"}', False),
        _raw_schema("overlong UTF-8", b'{"const":"\xc0\xaf"}'),
        _raw_schema("NUL", rb'{"const":"\u0000"}', False),
        _raw_schema("a NUL byte", b'{"const":"\x00"}'),
        _raw_schema("1e999", b'{"const":1e999}', False),
        _raw_schema("NaN", b'{"const":NaN}'),
        _raw_schema("one name twice", b'{"type":"string","type":"integer"}', False),
        _case("a name of NUL", False, guided_json=_object(**{"\0": {"type": "integer"}})),
        _case("text that is no JSON", guided_json='{"type": "string"'),
        _case("spaces of 10^9", guided_json={}, guided_whitespace_pattern="[ ]{0,1000000000}"),
        _case("spaces of anything", guided_json={}, guided_whitespace_pattern="(.|\n)*"),
        _case("nested spaces", guided_json={}, guided_whitespace_pattern="( *)*( *)*( *)*$"),
    ]


def _regexes() -> list[Hostile]:
    patterns = {
        "slow first mask": "^(a{1000}){1000}$",
        "slow third token": "^(.{1,5000}){1,500}$",
        "unclosed class": "[",
        "unclosed group": "(" * 500,
        "look-ahead": "a(?=b)",
        "look-behind": "(?<=a)b",
        "reference to a group": r"(a)\1",
        "word boundary": r"\ba\b",
        "counted to 10^9": "a{1000000000}",
        "negated class of everything": r"[^\s\S]",
        "unknown class": r"\p{Unheard}",
    }
    doubtful = {
        "alternatives": f"({'|'.join('a' * n for n in range(1, 400))})*",
        "nested stars": "((((((((((a*)*)*)*)*)*)*)*)*)*)*$",
        "classic of backtracking": "(a|aa|a?)+b",
        "unions of letters": r"(\p{L}|\p{N}|\p{S}){1,3000}",
        "deep groups": "(" * 400 + "a" + ")" * 400,
        "100 KiB": "ab" * 50 * KIB,
    }
    return [
        *(_case(f"regex: {name}", regex=each) for name, each in patterns.items()),
        *(_case(f"regex: {name}", False, guided_regex=each) for name, each in doubtful.items()),
        _case("regex: empty", regex=""),
    ]


def _grammars() -> list[Hostile]:
    lark = {
        "no start": 'other: "a"',
        "unknown rule": "start: missing",
        "a rule that needs itself": "start: start",
        "no end": 'start: "a" start',
        "nested parentheses": f"start: {'(' * 9000}'a'{')' * 9000}",
        "unknown token": "start: <[999999]>",
        "NUL": "start: \0",
        "import of a file": "%import .etc.passwd (A)\nstart: A",
        "slow token": "start: A\nA: /(a{1000}){1000}/",
        "another engine's grammar": '{"grammars": [{"json_schema": {"$ref": "#"}}]}',
        "GBNF: broken": "root ::= ::=",
        "GBNF: without root": 'a ::= "b"',
        "GBNF: nested": f"root ::= {'(' * 9000}",
    }
    doubtful = {
        "ambiguous": 'start: a\na: a a | "x" | ',
        "left recursion": 'start: start "a" | "a"',
        "5,000 rules": "start: r0\n" + "".join(f'r{n}: "a" r{n + 1}?\n' for n in range(5000))
        + 'r5000: "b"',
        "any text twice": "start: /(.|\\n)*/ /(.|\\n)*/",
    }  # fmt: skip
    choices = [f"{n}".rjust(4000, "x") for n in range(1024)]
    tag = {"type": "structural_tag", "format": {}}
    return [
        *(_case(f"grammar: {name}", guided_grammar=each) for name, each in lark.items()),
        *(_case(f"grammar: {name}", False, guided_grammar=each) for name, each in doubtful.items()),
        _case("1,024 choices of 4 KB", guided_choice=choices),
        _case("2,000 choices", guided_choice=["a"] * 2000),
        _case("no choice", guided_choice=[]),
        _case("an empty choice", guided_choice=[""]),
        _case("two constraints", guided_regex="a", guided_choice=["b"]),
        _case("structural tag", structured_outputs={"structural_tag": tag}),
    ]


def _tools() -> list[Hostile]:
    def tool(name: str, parameters: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    large = _object(**{f"p{n}": {"type": "string", "maxLength": 40} for n in range(25)})
    many = [tool(f"f{n}", large) for n in range(256)]
    return [
        _case("256 large tools", False, tools=many, tool_choice="required"),
        _case("257 tools", tools=[*many, tool("last", {})]),
        _case("a tool that needs itself", tools=[tool("f", {"$ref": "#"})], tool_choice="required"),
        _case("a tool with a slow pattern", tool_choice="required",
              tools=[tool("f", _object(a={"type": "string", "pattern": "^(a{1000}){1000}$"}))]),
        _case("a name of 1 MiB", tools=[tool("f" * 1024 * KIB, {})]),
    ]  # fmt: skip

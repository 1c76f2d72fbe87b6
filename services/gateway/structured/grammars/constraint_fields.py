"""The request fields that constrain the output, in the forms of all dialects and common servers.

response_format                   OpenAI; Workers AI, whose `json_schema` is the schema itself
structured_outputs, guided_*      vLLM
regex, ebnf, json_schema          SGLang
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from services.gateway.structured.grammars.constraint import ConstraintKind, OutputConstraint
from services.gateway.structured.grammars.whitespace import checked_whitespace
from shared.errors import InvalidRequest

MAX_CHOICES = 1024
MAX_CHOICE_CHARS = 4096

Choices = Annotated[
    list[Annotated[str, Meta(max_length=MAX_CHOICE_CHARS)]],
    Meta(min_length=1, max_length=MAX_CHOICES),
]
_WRAPPER_KEYS = ("name", "description", "schema", "strict")  # a `json_schema` has them


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    json: Any = None
    """The JSON Schema of the output, as an object or as text."""
    regex: str | None = None
    """The regular expression that the whole output matches."""
    choice: Choices | None = None
    """The texts of which the output is one."""
    grammar: str | None = None
    """The grammar of the output, in Lark or GBNF."""
    json_object: bool | None = None
    """Whether the output is any JSON object."""
    whitespace_pattern: str | None = None
    """The regular expression of the whitespace between JSON tokens."""
    disable_any_whitespace: bool | None = None
    """Whether the output has no whitespace between JSON tokens."""
    disable_additional_properties: bool | None = None
    """Whether objects have the properties of the schema alone."""
    disable_fallback: bool | None = None
    """Accepted for compatibility; it has no effect."""
    structural_tag: Any = None
    """Refused: it is not supported."""


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: str
    """`text`, `json_object` or `json_schema`."""
    json_schema: Any = None
    """An object with `schema` and maybe `name`, `strict`; or the JSON Schema itself."""
    schema: Any = None
    """The JSON Schema of a `json_object`, as other servers take it."""


class ConstraintFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of all dialects; at most one of them may have a constraint."""

    response_format: ResponseFormat | None = None
    """Constrains the output to JSON; one constraint at most."""
    structured_outputs: StructuredOutputs | None = None
    """Constrains the output in the form of vLLM."""
    guided_json: Any = None
    """The JSON Schema of the output, in the older form of vLLM."""
    guided_regex: str | None = None
    """The regular expression of the output, in the older form of vLLM."""
    guided_choice: Choices | None = None
    """The texts of which the output is one, in the older form of vLLM."""
    guided_grammar: str | None = None
    """The grammar of the output, in the older form of vLLM."""
    guided_whitespace_pattern: str | None = None
    """The whitespace between JSON tokens, in the older form of vLLM."""
    regex: str | None = None
    """The regular expression of the output, in the form of SGLang."""
    ebnf: str | None = None
    """The grammar of the output, in the form of SGLang."""
    json_schema: Any = None
    """The JSON Schema of the output, in the form of SGLang."""


_JSON_KINDS = ("json_schema", "json_object")


def constraint_of(body: ConstraintFields) -> OutputConstraint | None:
    """Returns the constraint of a body, or None. Raises InvalidRequest for an invalid constraint,
    for two constraints, and for a pattern of whitespace that no constraint uses.
    """
    found = list(_constraints(body))
    if len(found) > 1:
        first, second = found[0].param, found[1].param
        raise InvalidRequest(f"{first} and {second} exclude each other", param=second)
    constraint = found[0] if found else None
    pattern, param = _whitespace_pattern(body)
    if pattern is None:
        return constraint
    if constraint is None or constraint.kind not in _JSON_KINDS:
        raise InvalidRequest(f"{param} applies to JSON: a schema is needed", param=param)
    pattern = checked_whitespace(pattern, param)
    return msgspec.structs.replace(constraint, whitespace_pattern=pattern)


def _constraints(body: ConstraintFields) -> Iterator[OutputConstraint]:
    if body.response_format is not None:
        yield from _of_response_format(body.response_format)
    if body.structured_outputs is not None:
        yield from _of_structured_outputs(body.structured_outputs)
    for param in ("guided_json", "json_schema"):
        schema = getattr(body, param)
        if schema is not None:
            yield _schema(_schema_of(schema, param), param)
    for param in ("guided_regex", "regex"):
        expression = getattr(body, param)
        if expression is not None:
            yield _text("regex", expression, param)
    for param in ("guided_grammar", "ebnf"):
        grammar = getattr(body, param)
        if grammar is not None:
            yield _grammar(grammar, param)
    if body.guided_choice is not None:
        yield _choice(body.guided_choice, "guided_choice")


def _of_response_format(given: ResponseFormat) -> Iterator[OutputConstraint]:
    param = "response_format"
    for name, kind in (("json_schema", "json_schema"), ("schema", "json_object")):
        if getattr(given, name) is not None and given.type != kind:
            raise InvalidRequest(f"{name} is for the type {kind!r}", param=f"{param}.{name}")
    match given.type:
        case "text":
            return
        case "json_object" if given.schema is None:
            yield OutputConstraint(kind="json_object", param=param)
        case "json_object":
            yield _schema(_schema_of(given.schema, f"{param}.schema"), f"{param}.schema")
        case "json_schema":
            yield _of_wrapper(given.json_schema, f"{param}.json_schema")
        case _:
            raise InvalidRequest(
                f"{param}.type: {given.type!r} is not supported: use 'text', 'json_object' or "
                "'json_schema'",
                param=f"{param}.type",
            )


def _of_wrapper(given: Any, param: str) -> OutputConstraint:
    """Returns the constraint of OpenAI's `{name, schema, strict}`, or of the schema itself, perhaps
    with `strict`.
    """
    if given is None:
        raise InvalidRequest(f"{param} is missing", param=param)
    if not isinstance(given, dict):
        return _schema(_checked_schema(given, param), param)
    strict = given.get("strict")
    if strict is not None and not isinstance(strict, bool):
        param = f"{param}.strict"
        raise InvalidRequest(f"{param} must be a boolean", param=param)
    others = [each for each in given if each not in _WRAPPER_KEYS]
    if others and "schema" in given:
        place = f"{param}.{others[0][:64]}"
        raise InvalidRequest(f"{place}: unknown beside schema", param=place)
    if others:
        return _schema(given, param, is_strict=bool(strict))
    param = f"{param}.schema" if given else param
    if given.get("schema") is None:
        raise InvalidRequest(f"{param} is missing", param=param)
    return _schema(_checked_schema(given["schema"], param), param, is_strict=bool(strict))


def _of_structured_outputs(given: StructuredOutputs) -> Iterator[OutputConstraint]:
    param = "structured_outputs"
    for name in ("structural_tag", "disable_additional_properties"):
        if getattr(given, name) not in (None, False):
            raise InvalidRequest(f"{param}.{name} is not supported", param=f"{param}.{name}")
    if given.json is not None:
        yield _schema(_schema_of(given.json, f"{param}.json"), f"{param}.json")
    if given.regex is not None:
        yield _text("regex", given.regex, f"{param}.regex")
    if given.choice is not None:
        yield _choice(given.choice, f"{param}.choice")
    if given.grammar is not None:
        yield _grammar(given.grammar, f"{param}.grammar")
    if given.json_object:
        yield OutputConstraint(kind="json_object", param=f"{param}.json_object")


def _whitespace_pattern(body: ConstraintFields) -> tuple[str | None, str]:
    """Returns the pattern and the field that holds it."""
    nested = body.structured_outputs
    if nested is not None and nested.disable_any_whitespace:
        return "", "structured_outputs.disable_any_whitespace"
    if nested is not None and nested.whitespace_pattern is not None:
        return nested.whitespace_pattern, "structured_outputs.whitespace_pattern"
    return body.guided_whitespace_pattern, "guided_whitespace_pattern"


# ── values ───────────────────────────────────────────────────────────────────────────────────────


def _schema(schema: Any, param: str, *, is_strict: bool = False) -> OutputConstraint:
    source = msgspec.json.encode(schema).decode()
    return OutputConstraint(kind="json_schema", source=source, is_strict=is_strict, param=param)


def _text(kind: ConstraintKind, source: str, param: str) -> OutputConstraint:
    if not source:
        raise InvalidRequest(f"{param} must not be empty", param=param)
    return OutputConstraint(kind=kind, source=source, param=param)


def _grammar(source: str, param: str) -> OutputConstraint:
    """Returns a constraint in Lark, or in GBNF if the grammar has its rules."""
    if source.lstrip().startswith("{"):
        raise InvalidRequest(f"{param}: a grammar in Lark or GBNF is needed", param=param)
    return _text("gbnf" if "::=" in source else "lark", source, param)


def _choice(choices: list[str], param: str) -> OutputConstraint:
    if not any(choices):
        raise InvalidRequest(f"{param}: a choice must hold a character", param=param)
    source = msgspec.json.encode(choices).decode()
    return OutputConstraint(kind="choice", source=source, param=param)


def _schema_of(given: Any, param: str) -> Any:
    """Returns a schema, which the client sends as a value or as its JSON text."""
    return _checked_schema(_decoded(given, param) if isinstance(given, str) else given, param)


def _checked_schema(schema: Any, param: str) -> Any:
    if schema is False:
        raise InvalidRequest(f"{param}: no output matches the schema false", param=param)
    if schema is not True and not isinstance(schema, dict):
        raise InvalidRequest(f"{param}: a schema is an object or a boolean", param=param)
    return schema


def _decoded(text: str, param: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{param}: invalid JSON: {error}", param=param) from error
    except RecursionError:
        raise InvalidRequest(f"{param}: the schema is nested too deeply", param=param) from None

"""Validates and compiles Hugging Face's `response_template`.

Fields are `thinking` (also `reasoning`, `reasoning_content`), `content` and `tool_calls`; the text
of other fields is not shown. A field is a region between `open` and `close`; `content` without an
opening is the text outside regions. Two parsers of content are added:

python-calls:          `[f(a=1), g()]`, which gives a list of names and arguments
json with `separator`: several values joined by this character
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
import regex
from msgspec import Meta

from services.gateway.structured.tools.parsing.delimiter import (
    Anchor,
    Delimiter,
    Patience,
    compiled,
    delimiter,
)
from services.gateway.structured.tools.parsing.marker_tokens import MarkerTokens
from shared.errors import ConfigError

Kind = Literal["thinking", "content", "calls", "other"]
Content = Literal["text", "int", "float", "bool", "json", "xml-inline", "kv-lines", "python-calls"]
_KINDS: dict[str, Kind] = {
    "thinking": "thinking",
    "reasoning": "thinking",
    "reasoning_content": "thinking",
    "content": "content",
    "tool_calls": "calls",
}
_CALL_CONTENTS = ("json", "xml-inline", "python-calls")
_PLACEHOLDER = regex.compile(r"\{(\w+(?:\.\w+)*)\}")


class _FieldSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    open: Anchor | None = None
    open_pattern: str | None = None
    close: Anchor | None = None
    close_pattern: str | None = None
    content: Content = "text"
    content_args: dict[str, Any] = {}
    repeats: bool = False
    join: str | None = None
    optional: bool = True
    transform: Any = None
    transform_each: bool = False


class _Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    fields: Annotated[dict[str, _FieldSource], Meta(min_length=1)]
    version: Literal[1] = 1
    defaults: dict[str, Any] = {}
    start_anchor: Any = None  # unused: the prompt's end is known
    start_anchor_pattern: str | None = None


class TemplateRegion(msgspec.Struct, frozen=True, kw_only=True):
    """A field's region. `name` and `arguments` are the places of a call's name and arguments: paths
    of keys that begin with `content`, an item of a list, or a named group of the opening.
    """

    kind: Kind
    open: Delimiter | None
    close: Delimiter | None
    content: Content
    args: dict[str, Any]
    join: str
    name: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    is_list: bool = False

    @property
    def is_streamed(self) -> bool:
        """Whether the body is strict JSON, which is parsed while it arrives."""
        is_lax = self.args.get("unquoted_keys") or self.args.get("string_delims")
        return self.content == "json" and not is_lax

    @property
    def has_arguments_only(self) -> bool:
        return self.arguments == ("content",)


class ResponseTemplate(msgspec.Struct, frozen=True):
    regions: tuple[TemplateRegion, ...]

    def first(self, kind: Kind) -> TemplateRegion | None:
        return next((each for each in self.regions if each.kind == kind), None)


def compiled_template(
    source: Mapping[str, Any], markers: MarkerTokens, *, calls: bool = True
) -> ResponseTemplate:
    """Returns the compiled template, without the regions of calls if `calls` is false. Raises
    ConfigError, which names the key.
    """
    try:
        checked = msgspec.convert(source, _Source)
    except msgspec.ValidationError as error:
        raise ConfigError(f"response_template: {error}") from error
    if sum(_is_outside(each) for each in checked.fields.values()) > 1:
        raise ConfigError("response_template: more than one field has no `open`")
    patience = Patience()
    regions = [_region(name, each, markers, patience) for name, each in checked.fields.items()]
    return ResponseTemplate(tuple(each for each in regions if calls or each.kind != "calls"))


def _is_outside(field: _FieldSource) -> bool:
    return field.open is None and field.open_pattern is None


def _region(
    name: str, field: _FieldSource, markers: MarkerTokens, patience: Patience
) -> TemplateRegion:
    scope, kind = f"response_template.fields.{name}", _KINDS.get(name, "other")
    opening = delimiter(f"{scope}.open", field.open, field.open_pattern, markers, patience)
    region = TemplateRegion(
        kind=kind,
        open=opening,
        close=delimiter(f"{scope}.close", field.close, field.close_pattern, markers, patience),
        content=field.content,
        args=_marked_args(field.content_args, markers),
        join=field.join or "",
        is_list=field.transform_each,
    )
    if kind != "calls":
        return region
    if field.content not in _CALL_CONTENTS or opening is None:
        raise ConfigError(f"{scope}: needs `open` and one of the contents {_CALL_CONTENTS}")
    name_path, arguments_path = _paths(scope, field.transform)
    known = ("content", *opening.pattern.groupindex)
    for path in (name_path, arguments_path):
        if path[0] not in known and not field.transform_each:
            raise ConfigError(f"{scope}.transform: {path[0]!r} is none of {known}")
    if field.content == "xml-inline":
        _check_tags(scope, field.content_args)
    return msgspec.structs.replace(region, name=name_path, arguments=arguments_path)


def _check_tags(scope: str, args: Mapping[str, Any]) -> None:
    pattern = compiled(f"{scope}.content_args.tag", str(args.get("tag_pattern", "")))
    if not {"key", "value"} <= set(pattern.groupindex):
        raise ConfigError(f"{scope}.content_args.tag_pattern: needs the groups `key` and `value`")


def _paths(scope: str, transform: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the paths of the name and the arguments, in `{"type": "function",
    "function": {…}}`.
    """
    if transform is None:  # the body has this form
        return ("content", "function", "name"), ("content", "function", "arguments")
    function = transform.get("function", transform) if isinstance(transform, dict) else {}
    found = []
    for key in ("name", "arguments"):
        value = function.get(key) if isinstance(function, dict) else None
        match = _PLACEHOLDER.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            raise ConfigError(f"{scope}.transform.function.{key}: needs a placeholder like {{x}}")
        found.append(tuple(match[1].split(".")))
    return found[0], found[1]


def _marked_args(value: Any, markers: MarkerTokens) -> Any:
    match value:
        case str():
            return markers.replaced_pattern(value)
        case dict():
            return {key: _marked_args(each, markers) for key, each in value.items()}
        case list():
            return [_marked_args(each, markers) for each in value]
    return value

"""Request bodies: strict types, and an error that names the field.

Litestar calls `decode_bytes` instead of its lenient conversion, and still sees the Struct, so the
served OpenAPI document is generated from the enforced types.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec
from litestar.dto import AbstractDTO
from litestar.openapi.spec import Reference, Schema
from litestar.typing import FieldDefinition

from shared.errors import InvalidRequest

_AT = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>.*?)(?:\[\.\.\.\])?`$")
_MISSING = re.compile(r"missing required field `(?P<name>[^`]+)`")


class SupportedFields:
    """Decodes `struct`; rejects by name a field of `neutral_values` with any other value."""

    def __init__(self, struct: type[Any], neutral_values: Mapping[str, tuple[Any, ...]]) -> None:
        self._neutral_values = neutral_values
        self._decoder = msgspec.json.Decoder(struct)
        # Decodes the same bytes again and skips all other fields.
        optional = [(name, Any, msgspec.UNSET) for name in neutral_values]
        self._others = msgspec.json.Decoder(msgspec.defstruct("Others", optional))

    def decode(self, data: bytes) -> Any:
        """Raises InvalidRequest, with `param` set if one field is invalid."""
        try:
            body = self._decoder.decode(data)
            others = self._others.decode(data)
        except msgspec.ValidationError as error:
            raise _invalid_field(str(error)) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"the body is not valid JSON: {error}") from error
        except RecursionError:
            raise InvalidRequest("the body is nested too deeply") from None
        for name, neutral in self._neutral_values.items():
            value = getattr(others, name)
            if value is not msgspec.UNSET and not _is_one_of(value, neutral):
                raise InvalidRequest(f"{name} is not supported with this value", param=name)
        return body


def _is_one_of(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Compares booleans and numbers as different: False is not 0."""
    return any(
        value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral
    )


def _invalid_field(message: str) -> InvalidRequest:
    place = _AT.search(message)
    path = "" if place is None else place["path"]
    missing = _MISSING.search(message)
    if missing is not None:
        path = f"{path}.{missing['name']}" if path else missing["name"]
    text = _AT.sub("", message)
    return InvalidRequest(f"{path}: {text}" if path else text, param=path or None)


class StrictBody(AbstractDTO[Any]):
    """Base class of a dialect's body; a subclass sets `fields`."""

    fields: ClassVar[SupportedFields]

    def decode_bytes(self, value: bytes) -> Any:
        return self.fields.decode(value)

    def decode_builtins(self, value: dict[str, Any]) -> Any:
        raise InvalidRequest("the body must be JSON: send `Content-Type: application/json`")

    @classmethod
    def create_for_field_definition(cls, *args: Any, **kwargs: Any) -> None:
        """Creates no transfer model: `decode_bytes` returns the Struct."""

    @classmethod
    def create_openapi_schema(
        cls, field_definition: FieldDefinition, handler_id: str, schema_creator: Any
    ) -> Reference | Schema:
        schema: Reference | Schema = schema_creator.for_field_definition(field_definition)
        return schema

    @classmethod
    def generate_field_definitions(cls, model_type: type[Any]) -> Any:
        return iter(())

    @classmethod
    def detect_nested_field(cls, field_definition: FieldDefinition) -> bool:
        return False

"""Decodes request bodies: strict types, and an error that names the field.

Litestar calls `decode_bytes` instead of its lenient conversion. It still reads the Struct, so the
OpenAPI document is generated from the enforced types.
"""

from __future__ import annotations

from typing import Any, ClassVar

from litestar.dto import AbstractDTO
from litestar.openapi.spec import Reference, Schema
from litestar.typing import FieldDefinition

from services.gateway.request.supported_fields import SupportedFields
from shared.errors import InvalidRequest


class StrictBody(AbstractDTO[Any]):
    """Decodes a dialect's body; a subclass sets `fields`."""

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


class RawBody(StrictBody):
    """A body as bytes, since a large one is decoded elsewhere. `struct` is the type that it must
    match.
    """

    struct: ClassVar[type[Any]]

    def decode_bytes(self, value: bytes) -> bytes:
        return value

    @classmethod
    def create_openapi_schema(
        cls, field_definition: FieldDefinition, handler_id: str, schema_creator: Any
    ) -> Reference | Schema:
        described = FieldDefinition.from_annotation(cls.struct)
        return super().create_openapi_schema(described, handler_id, schema_creator)

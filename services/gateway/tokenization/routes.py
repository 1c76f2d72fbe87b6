"""`/tokenize` and `/detokenize`, over HTTP."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from litestar import MediaType, Request, Response
from litestar.openapi.spec import Reference, Schema
from litestar.params import Body
from litestar.typing import FieldDefinition

from services.gateway.http.body import StrictBody
from services.gateway.tokenization.bodies import DetokenizeRequest, TokenizeRequest
from services.gateway.tokenization.tokenization import Tokenization


class RawBody(StrictBody):
    """The body as bytes, since a large one is decoded elsewhere. `struct`: what it must hold."""

    struct: ClassVar[type[Any]]

    def decode_bytes(self, value: bytes) -> bytes:
        return value

    @classmethod
    def create_openapi_schema(
        cls, field_definition: FieldDefinition, handler_id: str, schema_creator: Any
    ) -> Reference | Schema:
        described = FieldDefinition.from_annotation(cls.struct)
        return super().create_openapi_schema(described, handler_id, schema_creator)


class TokenizeBody(RawBody):
    struct = TokenizeRequest


class DetokenizeBody(RawBody):
    struct = DetokenizeRequest


class TokenizationRoutes:
    def __init__(self, tokenization: Tokenization) -> None:
        self._tokenization = tokenization

    async def tokenize(
        self, request: Request[Any, Any, Any], data: Annotated[bytes, Body()]
    ) -> Response[bytes]:
        """The tokens of a prompt, or of messages as the model's chat template renders them."""
        return _response(request, await self._tokenization.tokenize(request.state.tenant, data))

    async def detokenize(
        self, request: Request[Any, Any, Any], data: Annotated[bytes, Body()]
    ) -> Response[bytes]:
        """The text of tokens, with the texts of special tokens."""
        return _response(request, await self._tokenization.detokenize(request.state.tenant, data))


def _response(request: Request[Any, Any, Any], body: bytes) -> Response[bytes]:
    limits = request.state.reservation.headers
    headers = {"x-request-id": request.state.request_id, **limits}
    return Response(body, media_type=MediaType.JSON, headers=headers)

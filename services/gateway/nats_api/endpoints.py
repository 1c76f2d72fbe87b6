"""The endpoints of the API over NATS: those of the dialects, and its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import msgspec

from services.gateway.dialects.dialect import EncodeError
from services.gateway.dialects.dialect_table import DIALECTS
from services.gateway.dialects.openai.errors import encode_error as encode_openai_error
from services.gateway.models.model_list import ModelList
from services.gateway.nats_api.discovery import EndpointInfo, schema_of
from services.gateway.request.endpoint import Endpoint
from shared.subjects import API_GROUP, CANCEL, api_request

MODELS = "models"


class CancelRequest(msgspec.Struct, frozen=True):
    """`request`: the header `Hearth-Request` of its messages."""

    request: str


class Cancelled(msgspec.Struct, frozen=True):
    """`cancelled`: False if the gateway does not run this request of this client."""

    request: str
    cancelled: bool


class NoFields(msgspec.Struct, frozen=True):
    """An empty body, or any: it is not read."""


@dataclass(frozen=True)
class ApiEndpoint:
    """Describes an endpoint to clients over NATS. `encode_error`: in the form of its dialect."""

    endpoint: Endpoint
    encode_error: EncodeError = encode_openai_error

    @cached_property
    def info(self) -> EndpointInfo:
        endpoint = self.endpoint
        metadata = {
            "request_schema": schema_of(endpoint.request),
            "response_schema": schema_of(endpoint.response),
        }
        if endpoint.event is not None:
            metadata |= {"streams": "true", "event_schema": schema_of(endpoint.event)}
        return EndpointInfo(
            name=endpoint.name,
            subject=api_request(endpoint.name, "*"),
            queue_group=API_GROUP,
            metadata=metadata,
        )


_ALL = (
    *(
        ApiEndpoint(each, dialect.encode_error)
        for dialect in DIALECTS
        for each in dialect.endpoints
        if each.is_on_nats
    ),
    ApiEndpoint(Endpoint(name=MODELS, request=NoFields, response=ModelList, is_free=True)),
    ApiEndpoint(Endpoint(name=CANCEL, request=CancelRequest, response=Cancelled, is_free=True)),
)
API_ENDPOINTS: Mapping[str, ApiEndpoint] = {each.endpoint.name: each for each in _ALL}


def error_encoder_of(name: str) -> EncodeError:
    """Returns that of OpenAI's dialect for an endpoint that does not exist."""
    found = API_ENDPOINTS.get(name)
    return encode_openai_error if found is None else found.encode_error

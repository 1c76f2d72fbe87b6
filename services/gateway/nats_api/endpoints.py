"""The endpoints of the API over NATS: those of the dialects, `models` and `cancel`."""

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
    """The body of a cancellation. `request` is the header `Hearth-Request` of the request's
    messages.
    """

    request: str


class Cancelled(msgspec.Struct, frozen=True):
    """The reply to a cancellation. `cancelled` is false if the gateway does not run this request of
    this client.
    """

    request: str
    cancelled: bool


class NoFields(msgspec.Struct, frozen=True):
    """A body that is not read and may be empty."""


@dataclass(frozen=True)
class ApiEndpoint:
    """An endpoint as clients over NATS see it. `encode_error` encodes errors in the form of its
    dialect.
    """

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
    """Returns the error encoder of an endpoint, or OpenAI's for an endpoint that does not exist."""
    found = API_ENDPOINTS.get(name)
    return encode_openai_error if found is None else found.encode_error

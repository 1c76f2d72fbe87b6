"""The endpoints of the API over NATS: those of the dialects, and `cancel`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from services.gateway.dialects.dialect import Dialect, EncodeError
from services.gateway.nats_api.discovery import EndpointInfo, schema_of
from services.gateway.request.endpoint import Endpoint
from shared.subjects import API_GROUP, CANCEL, api_request

# Clients see the docstrings of these structs: their schemas are in the reply to INFO.


class CancelRequest(msgspec.Struct, frozen=True):
    """`request`: the header `Hearth-Request` of its messages."""

    request: str


class Cancelled(msgspec.Struct, frozen=True):
    """`cancelled`: False if the gateway does not run this request of this client."""

    request: str
    cancelled: bool


@dataclass(frozen=True, slots=True)
class ApiEndpoint:
    """An endpoint as clients over NATS see it. `encode_error` encodes errors in the form of its
    dialect.
    """

    endpoint: Endpoint
    encode_error: EncodeError

    @property
    def info(self) -> EndpointInfo:
        endpoint = self.endpoint
        metadata = {
            "request_schema": schema_of((endpoint.request,)),
            "response_schema": schema_of((endpoint.response,)),
        }
        if endpoint.event is not None:
            metadata |= {"streams": "true", "event_schema": schema_of((endpoint.event,))}
        return EndpointInfo(
            name=endpoint.name,
            subject=api_request(endpoint.name, "*"),
            queue_group=API_GROUP,
            metadata=metadata,
        )


_CANCEL = Endpoint(name=CANCEL, request=CancelRequest, response=Cancelled, is_free=True)


def api_endpoints(dialects: Sequence[Dialect]) -> Mapping[str, ApiEndpoint]:
    """Returns the endpoints by name, in the order in which discovery lists them."""
    return {each.endpoint.name: each for each in _endpoints(dialects)}


def _endpoints(dialects: Sequence[Dialect]) -> Iterator[ApiEndpoint]:
    for dialect in dialects:
        for each in dialect.endpoints:
            if each.is_on_nats:
                yield ApiEndpoint(each, dialect.encode_error)
    yield ApiEndpoint(_CANCEL, dialects[0].encode_error)

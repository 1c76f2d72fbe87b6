"""What a route says of itself in the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from litestar.openapi import ResponseSpec

BEARER = "api_key"
SECURITY: list[dict[str, list[str]]] = [{BEARER: []}]  # routes that need an API key use it
# options of a route
ENDPOINT = "endpoint"  # the Endpoint whose bodies it takes
QUERY = "query"  # descriptions of the parameters of its query, by name
SERVED = "The result."
REJECTED: Mapping[int, str] = {
    400: "The request is invalid, and would be again; the message names the field.",
    401: "There is no API key, or it is unknown.",
    403: "The tenant of the key may not do this.",
    404: "There is no such model or record.",
    405: "LoRA adapters are not supported.",
    408: "The request took longer than its limit.",
    409: "The tenant's prefixes take as much as allowed.",
    413: "The body, or a field of it, is larger than its bound.",
    429: "A limit of the tenant is reached, or a queue is full; `Retry-After` says when to retry.",
    503: "No worker, or nothing that the request needs, can serve it now; a retry may help.",
    504: "The request took longer than its limit.",
    507: "The prefixes of all tenants take as much as allowed.",
    529: "A queue is full; a retry may help.",
}


def described(body: type[Any], error: type[Any], *statuses: int) -> dict[int, ResponseSpec]:
    """Returns the OpenAPI responses of a route. `error` is the type of a rejection."""
    served = ResponseSpec(body, generate_examples=False, description=SERVED)
    return {200: served, **{each: _rejection(error, each) for each in sorted(statuses)}}


def _rejection(error: type[Any], status: int) -> ResponseSpec:
    return ResponseSpec(error, generate_examples=False, description=REJECTED[status])

"""The OpenAPI document of a gateway: Litestar's, with the schemas of the types that decode bodies,
and what the endpoints say of themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, get_args

import msgspec
from litestar import Litestar
from litestar.enums import HttpMethod
from litestar.handlers import HTTPRouteHandler
from litestar.routes import HTTPRoute

from services.gateway.http.openapi import ENDPOINT, QUERY, REJECTED, SERVED
from services.gateway.request.endpoint import Endpoint
from services.gateway.schemas.struct_schemas import described_schemas

REFERENCE = "#/components/schemas/{name}"
METHODS = {each.value.lower() for each in HttpMethod}
PATH_PARAMETERS = {
    "account": "The tenant of the API key.",
    "model": "The name or alias of a model; its slashes may be written as `%2F`.",
    "model_id": "The name or alias of a model.",
    "name": "The name of the prefix.",
    "request_id": "The id of the request.",
    "response_id": "The id of the response.",
}


def openapi_document(app: Litestar) -> dict[str, Any]:
    """Returns the document. It takes some 0.4 s of a core: call it on a thread."""
    document = app.openapi_schema.to_schema()
    types: dict[Any, None] = {}
    for operation, handler in _operations(app, document):
        types |= dict.fromkeys(_types_of(handler))
        _complete(operation, handler)
    schemas: dict[str, Any] = document["components"]["schemas"]
    schemas |= described_schemas(types, REFERENCE)[1]
    return document


def _operations(
    app: Litestar, document: dict[str, Any]
) -> Iterator[tuple[dict[str, Any], HTTPRouteHandler]]:
    for route in app.routes:
        described = document["paths"].get(getattr(route, "path_format", ""), {})
        if isinstance(route, HTTPRoute):
            for method, (handler, _) in route.route_handler_map.items():
                if method.lower() in described:
                    yield described[method.lower()], handler


def _types_of(handler: HTTPRouteHandler) -> Iterator[Any]:
    endpoint: Endpoint | None = handler.opt.get(ENDPOINT)
    if endpoint is not None:
        yield from (endpoint.request, endpoint.response)
        if endpoint.event is not None:
            yield endpoint.event
    body = handler.parsed_data_field
    returned = handler.parsed_return_field.annotation
    named = (body.annotation if body else None, returned, *get_args(returned))
    yield from (each for each in named if _is_struct(each))
    yield from (each.data_container for each in (handler.responses or {}).values())


def _is_struct(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, msgspec.Struct)


def _complete(operation: dict[str, Any], handler: HTTPRouteHandler) -> None:
    responses = operation["responses"]
    texts = {SERVED, *REJECTED.values()}
    described = {status: each for status, each in responses.items() if each["description"] in texts}
    operation["responses"] = described or {"200": {**responses["200"], "description": SERVED}}
    if "description" in operation:
        operation["description"] = " ".join(operation["description"].split())
    for parameter in operation.get("parameters", ()):
        parameter["description"] = PATH_PARAMETERS[parameter["name"]]
    query = list(_query_parameters(handler.opt.get(QUERY, {}).items()))
    if query:
        operation["parameters"] = [*operation.get("parameters", ()), *query]
    endpoint: Endpoint | None = handler.opt.get(ENDPOINT)
    if endpoint is not None:
        _complete_endpoint(operation, endpoint)


def _query_parameters(texts: Iterable[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    for name, text in texts:
        schema = {"type": "string"}
        yield {"name": name, "in": "query", "schema": schema, "description": text}


def _complete_endpoint(operation: dict[str, Any], endpoint: Endpoint) -> None:
    body = operation.setdefault("requestBody", {"required": True})
    media = {"schema": {"$ref": REFERENCE.format(name=endpoint.request.__name__)}}
    if endpoint.example is not None:
        media["example"] = dict(endpoint.example)
    body["content"] = {"application/json": media}
    if endpoint.event is not None:
        schema = described_schemas([endpoint.event], REFERENCE)[0][0]
        operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": schema}

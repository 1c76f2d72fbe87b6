"""The paths of the Responses API: below /v1, and below /ai/v1 of an account."""

from __future__ import annotations

from functools import partial
from typing import Any

from litestar import delete, get, post
from litestar.handlers import HTTPRouteHandler

from services.gateway.paths import OPENAI_ROOTS, check_account
from services.gateway.responses.endpoint import NAME
from services.gateway.responses.object import ResponseObject
from services.gateway.responses.routes import (
    DeletedResponse,
    InputTokens,
    ItemList,
    ResponsesBody,
    ResponsesRoutes,
)
from services.gateway.route_options import BODY_KIND


def responses_handlers(
    routes: ResponsesRoutes, known: dict[str, Any], responses: Any, errors: tuple[int, ...]
) -> list[HTTPRouteHandler]:
    """`known`: options of the handlers whose requests have an API key. `responses(body, *statuses)`
    describes them.
    """
    options = {"guards": [check_account], "return_dto": None, **known}
    bodies = partial(post, dto=ResponsesBody, opt={BODY_KIND: NAME}, status_code=200, **options)
    one = _paths("/{response_id:str}")
    stored = (401, 403, 404, 429, 503)
    refused = partial(post, status_code=200, include_in_schema=False, **options)
    return [
        bodies(path=_paths(""), responses=responses(ResponseObject, *errors))(routes.create),
        bodies(path=_paths("/input_tokens"), responses=responses(InputTokens, *errors))(
            routes.input_tokens
        ),
        get(path=one, responses=responses(ResponseObject, *stored, 400), **options)(routes.get),
        delete(
            path=one,
            status_code=200,
            responses=responses(DeletedResponse, *stored),
            **options,
        )(routes.delete),
        get(
            path=_paths("/{response_id:str}/input_items"),
            responses=responses(ItemList, *stored, 400),
            **options,
        )(routes.input_items),
        refused(path=_paths("/{response_id:str}/cancel"))(routes.cancel),
        refused(path=_paths("/compact"))(routes.compact),
        refused(path=[f"{root}/conversations" for root in OPENAI_ROOTS])(routes.conversations),
    ]


def _paths(end: str) -> list[str]:
    return [f"{root}/responses{end}" for root in OPENAI_ROOTS]

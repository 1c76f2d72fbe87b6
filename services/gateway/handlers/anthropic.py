"""The paths of Anthropic's API."""

from __future__ import annotations

from functools import partial
from typing import Any

from litestar import post
from litestar.handlers import HTTPRouteHandler
from litestar.openapi import ResponseSpec

from services.gateway.anthropic.endpoint import MESSAGES
from services.gateway.anthropic.errors import ErrorEnvelope
from services.gateway.anthropic.response_types import MessageResponse, TokenCount
from services.gateway.anthropic.routes import AnthropicRoutes, CountBody, MessagesBody
from services.gateway.dialects import MESSAGES_PATH
from services.gateway.route_options import BODY_KIND, RAW

ERRORS = (400, 401, 403, 404, 413, 429, 503, 504, 529)


def anthropic_handlers(routes: AnthropicRoutes, known: dict[str, Any]) -> list[HTTPRouteHandler]:
    """`known`: options of the handlers whose requests have an API key."""
    posts = partial(post, status_code=200, return_dto=None, **known)
    messages = posts(
        path=MESSAGES_PATH,
        dto=MessagesBody,
        opt={BODY_KIND: MESSAGES.name},
        responses=_responses(MessageResponse),
    )
    count_tokens = posts(
        path=f"{MESSAGES_PATH}/count_tokens",
        dto=CountBody,
        opt={BODY_KIND: RAW},
        responses=_responses(TokenCount),
    )
    return [messages(routes.messages), count_tokens(routes.count_tokens)]


def _responses(body: type[Any]) -> dict[int, ResponseSpec]:
    rejected = ResponseSpec(ErrorEnvelope, generate_examples=False, description="rejected")
    served = ResponseSpec(body, generate_examples=False, description="served")
    return {200: served, **dict.fromkeys(ERRORS, rejected)}

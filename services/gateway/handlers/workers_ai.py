"""The paths of Workers AI: each below Cloudflare's prefix, and without it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from litestar import HttpMethod, post, route
from litestar.handlers import HTTPRouteHandler

from services.gateway.paths import ACCOUNT_ROOTS, check_account
from services.gateway.route_options import BODY_KIND, IS_FREE, MODEL_OF
from services.gateway.workers_ai.endpoint import NAME
from services.gateway.workers_ai.routes import WorkersAIRoutes, run_model

Handler = Callable[..., Any]


def workers_ai_handlers(routes: WorkersAIRoutes, known: dict[str, Any]) -> list[HTTPRouteHandler]:
    """`known`: options of the handlers whose requests have an API key."""
    options = {"guards": [check_account], "return_dto": None, **known}
    posts = partial(post, status_code=200, **options)
    reads = partial(
        route, http_method=[HttpMethod.GET, HttpMethod.HEAD], opt={IS_FREE: True}, **options
    )
    # without a model the handler names what is missing
    runs = posts(
        path=_paths("/run", "/run/{model:path}"), opt={BODY_KIND: NAME, MODEL_OF: run_model}
    )
    searches: dict[str, Handler] = {
        "/models/search": routes.models,
        "/models/schema": routes.schema,
        "/tasks/search": routes.tasks,
        "/authors/search": routes.authors,
    }
    return [
        runs(routes.run),
        *(reads(path=_paths(path))(handler) for path, handler in searches.items()),
    ]


def _paths(*ends: str) -> list[str]:
    return [f"{root}{end}" for root in ACCOUNT_ROOTS for end in ends]

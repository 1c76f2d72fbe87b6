"""The route of `/tokenizer_info`."""

from __future__ import annotations

from typing import Any

from litestar import HttpMethod, Request, Response, route

from services.gateway.dialects.dialect import Handlers
from services.gateway.dialects.http_parts import HttpParts
from services.gateway.dialects.openai.errors import ErrorEnvelope
from services.gateway.dialects.route_options import IS_FREE
from services.gateway.dialects.tokenization.bodies import TokenizerInfo
from services.gateway.dialects.tokenization.tokenization import Tokenization
from services.gateway.http.openapi import QUERY, described


class TokenizerInfoRoute:
    def __init__(self, tokenization: Tokenization) -> None:
        self._tokenization = tokenization

    def handlers(self, http: HttpParts) -> Handlers:
        read = route(
            ["/tokenizer_info", "/v1/tokenizer_info"],
            http_method=[HttpMethod.GET, HttpMethod.HEAD],
            summary="Describes a tokenizer",
            opt={IS_FREE: True, QUERY: {"model": "Another model than the gateway's first."}},
            responses=described(TokenizerInfo, ErrorEnvelope, 400, 401, 403, 404, 503),
            **http.options,
        )
        return [read(self.info)]

    async def info(self, request: Request[Any, Any, Any]) -> Response[TokenizerInfo]:
        """The special tokens and the chat template, for clients that prepare prompts themselves."""
        name = request.query_params.get("model")
        info = await self._tokenization.info(request.state.tenant, name)
        return Response(info, headers={"x-request-id": request.state.request_id})

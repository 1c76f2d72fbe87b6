"""`/tokenize` and `/detokenize`, over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any

from litestar import Request, Response
from litestar.params import Body
from litestar.types import Receive, Scope, Send

from services.gateway.http.body import RawBody
from services.gateway.tokenization.bodies import DetokenizeRequest, TokenizeRequest, TokenizerInfo
from services.gateway.tokenization.tokenization import Tokenization

PART_BYTES = 128 << 10  # 0.1 ms of the event loop


class TokenizeBody(RawBody):
    struct = TokenizeRequest


class DetokenizeBody(RawBody):
    struct = DetokenizeRequest


class JsonParts:
    """A response in parts: a MiB of text can have 7 MiB of tokens and their spellings."""

    def __init__(self, body: bytes, headers: Mapping[str, str]) -> None:
        self._body = body
        self._headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            **headers,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name.encode(), value.encode()) for name, value in self._headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for start in range(0, len(self._body), PART_BYTES):
            if start:
                await asyncio.sleep(0)  # running streams continue
            end = start + PART_BYTES
            part, has_more = self._body[start:end], end < len(self._body)
            await send({"type": "http.response.body", "body": part, "more_body": has_more})


class TokenizationRoutes:
    def __init__(self, tokenization: Tokenization) -> None:
        self._tokenization = tokenization

    async def tokenize(
        self, request: Request[Any, Any, Any], data: Annotated[bytes, Body()]
    ) -> JsonParts:
        """The tokens of a prompt, or of messages as the model's chat template renders them."""
        return _response(request, await self._tokenization.tokenize(request.state.tenant, data))

    async def detokenize(
        self, request: Request[Any, Any, Any], data: Annotated[bytes, Body()]
    ) -> JsonParts:
        """The text of tokens, with the texts of special tokens."""
        return _response(request, await self._tokenization.detokenize(request.state.tenant, data))

    async def info(self, request: Request[Any, Any, Any]) -> Response[TokenizerInfo]:
        """The special tokens and the chat template, for clients that prepare prompts themselves.
        `model`: another than the gateway's own.
        """
        name = request.query_params.get("model")
        info = await self._tokenization.info(request.state.tenant, name)
        return Response(info, headers={"x-request-id": request.state.request_id})


def _response(request: Request[Any, Any, Any], body: bytes) -> JsonParts:
    limits = request.state.reservation.headers
    return JsonParts(body, {"x-request-id": request.state.request_id, **limits})

"""The routes of OpenAI's API that generate: each opens its request and writes the response."""

from __future__ import annotations

from typing import Annotated, Any

from litestar import Request
from litestar.params import Body

from services.gateway.http.affinity import AFFINITY_HEADER, session_key_of
from services.gateway.http.body import StrictBody
from services.gateway.http.response import GenerationResponse
from services.gateway.openai.chat import ChatCompletionRequest
from services.gateway.openai.completions import CompletionRequest
from services.gateway.openai.embeddings import EmbeddingRequest
from services.gateway.openai.endpoints import CHAT, COMPLETIONS, EMBEDDINGS
from services.gateway.request.endpoint import Endpoint
from services.gateway.request.opener import Opener
from shared.clock import Clock


class ChatBody(StrictBody):
    fields = CHAT.fields


class CompletionBody(StrictBody):
    fields = COMPLETIONS.fields


class EmbeddingBody(StrictBody):
    fields = EMBEDDINGS.fields


class OpenAIRoutes:
    """The handlers of one gateway. `keep_alive_s`: silence before a stream sends an empty event."""

    def __init__(self, opener: Opener, *, clock: Clock, keep_alive_s: float) -> None:
        self._opener = opener
        self._clock = clock
        self._keep_alive_s = keep_alive_s

    async def chat_completions(
        self, request: Request[Any, Any, Any], data: Annotated[ChatCompletionRequest, Body()]
    ) -> GenerationResponse:
        """With `stream`, server-sent events of `chat.completion.chunk`, then `[DONE]`."""
        return await self._open(CHAT, request, data)

    async def completions(
        self, request: Request[Any, Any, Any], data: Annotated[CompletionRequest, Body()]
    ) -> GenerationResponse:
        """With `stream`, server-sent events of `text_completion`, then `[DONE]`."""
        return await self._open(COMPLETIONS, request, data)

    async def embeddings(
        self, request: Request[Any, Any, Any], data: Annotated[EmbeddingRequest, Body()]
    ) -> GenerationResponse:
        """Embeddings of the model's last hidden state: of the last token or the mean of all."""
        return await self._open(EMBEDDINGS, request, data)

    async def _open(
        self, endpoint: Endpoint, request: Request[Any, Any, Any], body: Any
    ) -> GenerationResponse:
        opened = await self._opener.open(
            endpoint,
            body,
            request.state.reservation,
            prompts=request.state.prompts,
            affinity_key=request.headers.get(AFFINITY_HEADER),
            session_key=session_key_of(request.headers),
        )
        return GenerationResponse(opened, clock=self._clock, keep_alive_s=self._keep_alive_s)

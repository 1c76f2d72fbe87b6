"""The routes of OpenAI's API: each submits its requests and writes the response in its dialect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

import msgspec
from litestar import Request
from litestar.params import Body

from services.gateway.catalog import Catalog
from services.gateway.http.body import StrictBody
from services.gateway.http.dialect import Dialect
from services.gateway.http.response import GenerationResponse
from services.gateway.openai import chat, completions, embeddings
from services.gateway.openai.chat import ChatCompletionRequest
from services.gateway.openai.chat_response import ChatRenderer
from services.gateway.openai.completion_response import CompletionRenderer
from services.gateway.openai.completions import CompletionRequest
from services.gateway.openai.embedding_response import EmbeddingRenderer
from services.gateway.openai.embeddings import EmbeddingRequest
from services.gateway.openai.prepared_bodies import with_prompts
from services.gateway.request.generation_request import GenerationRequest
from services.gateway.request.output_merger import OutputMerger
from services.gateway.request.submission import Submission
from services.gateway.text.model_files import ModelFiles
from shared.clock import Clock

AFFINITY_HEADER = "x-session-affinity"  # overrides the body's prompt_cache_key


class ChatBody(StrictBody):
    fields = chat.CHAT_FIELDS


class CompletionBody(StrictBody):
    fields = completions.COMPLETION_FIELDS


class EmbeddingBody(StrictBody):
    fields = embeddings.EMBEDDING_FIELDS


class OpenAIRoutes:
    """The handlers of one gateway. `wall_clock`: seconds since 1970, for `created`.
    `keep_alive_s`: silence of a stream before a comment is sent.
    """

    def __init__(
        self,
        submission: Submission,
        catalog: Catalog,
        files: ModelFiles,
        wall_clock: Callable[[], float],
        *,
        clock: Clock,
        keep_alive_s: float,
    ) -> None:
        self._submission = submission
        self._catalog = catalog
        self._files = files
        self._wall_clock = wall_clock
        self._clock = clock
        self._keep_alive_s = keep_alive_s

    async def chat_completions(
        self, request: Request[Any, Any, Any], data: Annotated[ChatCompletionRequest, Body()]
    ) -> GenerationResponse:
        """With `stream`, server-sent events of `chat.completion.chunk`, then `[DONE]`."""
        generation = chat.to_generation_request(data, self._catalog.name)
        merger = await self._submit(request, [generation])
        renderer = ChatRenderer(
            merger=merger,
            token_bytes=self._files.tokenizer.token_bytes,
            request_id=request.state.request_id,
            model=generation.model,
            created=int(self._wall_clock()),
            has_usage=data.has_usage,
            has_logprobs=bool(data.logprobs),
        )
        return self._response(merger, renderer, request, is_streamed=bool(data.stream))

    async def completions(
        self, request: Request[Any, Any, Any], data: Annotated[CompletionRequest, Body()]
    ) -> GenerationResponse:
        """With `stream`, server-sent events of `text_completion`, then `[DONE]`."""
        generations = completions.to_generation_requests(data, self._catalog.name)
        merger = await self._submit(request, generations)
        renderer = CompletionRenderer(
            merger=merger,
            token_bytes=self._files.tokenizer.token_bytes,
            request_id=request.state.request_id,
            model=generations[0].model,
            created=int(self._wall_clock()),
            has_usage=data.has_usage,
            has_logprobs=data.logprobs is not None,
            num_shown=data.num_choices,
        )
        return self._response(merger, renderer, request, is_streamed=bool(data.stream))

    async def embeddings(
        self, request: Request[Any, Any, Any], data: Annotated[EmbeddingRequest, Body()]
    ) -> GenerationResponse:
        """Embeddings of the model's last hidden state: of the last token or the mean of all."""
        hidden_size = self._files.limits.hidden_size
        name = self._catalog.name
        generations = embeddings.to_generation_requests(data, name, hidden_size)
        merger = await self._submit(request, generations)
        renderer = EmbeddingRenderer(
            merger=merger,
            request_id=request.state.request_id,
            model=generations[0].model,
            is_base64=data.encoding_format == "base64",
            is_normalized=data.normalize is not False,
        )
        return self._response(merger, renderer, request, is_streamed=False)

    async def _submit(
        self, request: Request[Any, Any, Any], generations: Sequence[GenerationRequest]
    ) -> OutputMerger:
        state = request.state
        if state.prompts is not None:
            generations = with_prompts(generations, state.prompts)
        session = request.headers.get(AFFINITY_HEADER)
        if session:
            generations = [msgspec.structs.replace(g, affinity_key=session) for g in generations]
        return await self._submission.submit(state.reservation, generations)

    def _response(
        self,
        merger: OutputMerger,
        dialect: Dialect,
        request: Request[Any, Any, Any],
        *,
        is_streamed: bool,
    ) -> GenerationResponse:
        return GenerationResponse(
            merger,
            dialect,
            is_streamed=is_streamed,
            headers={"x-request-id": request.state.request_id, **merger.headers},
            cancel=partial(self._submission.cancel, merger.outputs),
            clock=self._clock,
            keep_alive_s=self._keep_alive_s,
        )

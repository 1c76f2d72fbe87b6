"""The routes that ask a model: each opens its requests and answers in its dialect."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Protocol

import msgspec
from litestar import Request
from litestar.params import Body

from services.gateway.catalog import Catalog
from services.gateway.http.body import StrictBody
from services.gateway.http.response import BodyRenderer, EventRenderer, GenerationResponse
from services.gateway.openai import chat, completions, embeddings
from services.gateway.openai.chat import ChatCompletionRequest
from services.gateway.openai.chat_response import ChatRenderer
from services.gateway.openai.completion_response import CompletionRenderer
from services.gateway.openai.completions import CompletionRequest
from services.gateway.openai.embedding_response import EmbeddingRenderer
from services.gateway.openai.embeddings import EmbeddingRequest
from services.gateway.request.generation_request import GenerationRequest
from services.gateway.request.output_merger import OutputMerger
from services.gateway.request.preparation import PreparedRequest
from services.gateway.request.request_output import RequestOutput
from services.gateway.request.reservation import Reservation
from services.gateway.text.model_files import ModelFiles
from shared.tenancy.tenant import TenantRecord

AFFINITY_HEADER = "x-session-affinity"  # before the body's prompt_cache_key


class ChatBody(StrictBody):
    fields = chat.CHAT_FIELDS


class CompletionBody(StrictBody):
    fields = completions.COMPLETION_FIELDS


class EmbeddingBody(StrictBody):
    fields = embeddings.EMBEDDING_FIELDS


class Generator(Protocol):
    """What these routes need of the service behind them."""

    catalog: Catalog
    files: ModelFiles

    async def prepare(
        self, tenant: TenantRecord, request_id: str, generation: GenerationRequest
    ) -> PreparedRequest:
        """Raises the HearthError with which the request is refused."""
        ...

    async def admit(
        self, tenant: TenantRecord, request_id: str, prepared: Sequence[PreparedRequest]
    ) -> Reservation:
        """For all prompts of one answer. Raises the HearthError with which it is refused."""
        ...

    def open(self, prepared: PreparedRequest, reservation: Reservation) -> RequestOutput:
        """Raises the HearthError with which the request is refused."""
        ...

    def cancel(self, request_id: str) -> None:
        """The client is gone; nothing happens if the request has ended."""
        ...


class OpenAIRoutes:
    """The handlers, bound to one gateway. `wall_clock`: seconds since 1970, for `created`."""

    def __init__(self, gateway: Generator, wall_clock: Callable[[], float]) -> None:
        self._gateway = gateway
        self._wall_clock = wall_clock

    async def chat_completions(
        self, request: Request[Any, Any, Any], data: Annotated[ChatCompletionRequest, Body()]
    ) -> GenerationResponse:
        """With `stream`, server-sent events of `chat.completion.chunk`, then `[DONE]`."""
        generation = chat.to_generation_request(data, self._gateway.catalog.name)
        merger = await self._open(request, [generation])
        renderer = ChatRenderer(
            merger=merger,
            token_bytes=self._gateway.files.tokenizer.token_bytes,
            request_id=request.state.request_id,
            model=generation.model,
            created=int(self._wall_clock()),
            has_usage=data.has_usage,
            has_logprobs=bool(data.logprobs),
        )
        return self._answer(merger, renderer if data.stream else renderer.body, request)

    async def completions(
        self, request: Request[Any, Any, Any], data: Annotated[CompletionRequest, Body()]
    ) -> GenerationResponse:
        """With `stream`, server-sent events of `text_completion`, then `[DONE]`."""
        generations = completions.to_generation_requests(data, self._gateway.catalog.name)
        merger = await self._open(request, generations)
        renderer = CompletionRenderer(
            merger=merger,
            token_bytes=self._gateway.files.tokenizer.token_bytes,
            request_id=request.state.request_id,
            model=generations[0].model,
            created=int(self._wall_clock()),
            has_usage=data.has_usage,
            has_logprobs=data.logprobs is not None,
            num_shown=data.num_choices,
        )
        return self._answer(merger, renderer if data.stream else renderer.body, request)

    async def embeddings(
        self, request: Request[Any, Any, Any], data: Annotated[EmbeddingRequest, Body()]
    ) -> GenerationResponse:
        """Of the model's last hidden state, at the last token or over all of them."""
        hidden_size = self._gateway.files.limits.hidden_size
        name = self._gateway.catalog.name
        generations = embeddings.to_generation_requests(data, name, hidden_size)
        merger = await self._open(request, generations)
        renderer = EmbeddingRenderer(
            merger=merger,
            request_id=request.state.request_id,
            model=generations[0].model,
            is_base64=data.encoding_format == "base64",
            is_normalized=data.normalize is not False,
        )
        return self._answer(merger, renderer.body, request)

    async def _open(
        self, request: Request[Any, Any, Any], generations: Sequence[GenerationRequest]
    ) -> OutputMerger:
        """All are admitted or none is: no worker hears of a list in which one prompt is bad.

        Running streams get their turn between two of them.
        """
        state = request.state
        tenant, request_id = state.tenant, state.request_id
        session = request.headers.get(AFFINITY_HEADER)
        if session:
            generations = [msgspec.structs.replace(g, affinity_key=session) for g in generations]
        prepared: list[PreparedRequest] = []
        for index, generation in enumerate(generations):
            if index:
                await asyncio.sleep(0)
            own_id = f"{request_id}-{index}" if index else request_id
            prepared.append(await self._gateway.prepare(tenant, own_id, generation))
        reservation = await self._gateway.admit(tenant, request_id, prepared)
        state.limit_headers = reservation.headers
        outputs: list[RequestOutput] = []
        try:
            for each in prepared:
                if outputs:
                    await asyncio.sleep(0)
                outputs.append(self._gateway.open(each, reservation))
        except BaseException:
            self._cancel(outputs)
            raise
        finally:
            reservation.close_submissions()
        return OutputMerger(outputs, num_choices=generations[0].num_choices)

    def _answer(
        self,
        merger: OutputMerger,
        content: EventRenderer | BodyRenderer,
        request: Request[Any, Any, Any],
    ) -> GenerationResponse:
        cancel = partial(self._cancel, merger.outputs)
        state = request.state
        headers = {"x-request-id": state.request_id, **state.limit_headers}
        return GenerationResponse(merger, content, headers, cancel)

    def _cancel(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            self._gateway.cancel(output.request_id)

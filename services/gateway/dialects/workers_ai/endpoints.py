"""Declares the endpoint of `ai/run`, whose path names the model: `routes.py` has its handlers."""

from __future__ import annotations

from collections.abc import Callable

from services.gateway.dialects.workers_ai.embedding_response import WorkersAIEmbeddingEncoder
from services.gateway.dialects.workers_ai.envelope import Success
from services.gateway.dialects.workers_ai.padding import PaddedTextEvent
from services.gateway.dialects.workers_ai.rerank_response import WorkersAIRerankEncoder
from services.gateway.dialects.workers_ai.run_request import (
    DEFAULT_POOLING,
    RUN_FIELDS,
    RunRequest,
    for_model,
    to_generation_requests,
    without_prompts,
)
from services.gateway.dialects.workers_ai.run_response import RunEncoder, RunFrame, TextEvents
from services.gateway.output.encoder import Encoder
from services.gateway.output.framing import Framing, TextEvent
from services.gateway.request.endpoint import GeneratingEndpoint, ResponseContext


class RunState:
    """Encodes the parts of events that do not depend on a request once. `random_bytes(n)`: n random
    bytes for the padding of texts; None: no padding.
    """

    def __init__(self, random_bytes: Callable[[int], bytes] | None) -> None:
        self._random_bytes = random_bytes
        self._by_framing: dict[Framing, TextEvents] = {}

    def text_events(self, framing: Framing) -> TextEvents:
        known = self._by_framing.get(framing)
        if known is None:
            known = self._by_framing[framing] = self._made(framing)
        return known

    def _made(self, framing: Framing) -> TextEvents:
        if self._random_bytes is None:
            return TextEvent(framing, lambda text: RunFrame(response=text))
        return PaddedTextEvent(framing, self._random_bytes)


def _encoder(body: RunRequest, context: ResponseContext) -> Encoder:
    """Returns the encoder for the body's kind. `context.state`: a RunState."""
    pairs = body.pairs
    if pairs is not None:
        return WorkersAIRerankEncoder(context, pairs, body.top_k)
    framing = context.framing
    if not body.is_embedding:
        return RunEncoder(
            framing,
            context.state.text_events(framing),
            lambda: context.merger.warnings,
            is_json=body.is_json,
        )
    return WorkersAIEmbeddingEncoder(
        framing,
        context.merger,
        context.pooling or DEFAULT_POOLING,
        is_normalized=body.normalize is not False,
    )


RUN = GeneratingEndpoint(
    name="workers_ai",
    errors=(400, 401, 403, 404, 405, 408, 413, 429),
    example={"messages": [{"role": "user", "content": "What is the KV cache?"}]},
    request=RunRequest,
    response=Success,
    is_on_nats=False,
    takes_images=True,
    fields=RUN_FIELDS,
    generations=to_generation_requests,
    is_streamed=lambda body: body.is_streamed,
    for_model=for_model,
    encoder=_encoder,
    without_prompts=without_prompts,
)

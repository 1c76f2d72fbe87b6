"""`ai/run` as an endpoint: its encoder depends on the body, and on the gateway's padding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from services.gateway.output.encoder import Encoder
from services.gateway.output.framing import Framing, TextEvent
from services.gateway.request.endpoint import Endpoint, ResponseContext
from services.gateway.workers_ai.embedding_response import EmbeddingEncoder
from services.gateway.workers_ai.padding import PaddedTextEvent
from services.gateway.workers_ai.rerank_response import RerankEncoder
from services.gateway.workers_ai.run_request import (
    DEFAULT_POOLING,
    RUN_FIELDS,
    RunRequest,
    for_model,
    to_generation_requests,
    without_prompts,
)
from services.gateway.workers_ai.run_response import RunEncoder, RunFrame, TextEvents

NAME = "workers_ai"


def run_endpoint(random_bytes: Callable[[int], bytes] | None = None) -> Endpoint:
    """`random_bytes(n)`: n random bytes for the padding of texts; None: no padding."""
    text_events = _TextEvents(random_bytes)
    return Endpoint(
        name=NAME,
        fields=RUN_FIELDS,
        generations=to_generation_requests,
        is_streamed=lambda body: body.is_streamed,
        for_model=for_model,
        encoder=partial(_encoder, text_events),
        without_prompts=without_prompts,
    )


class _TextEvents:
    """The parts of events that do not depend on a request are encoded once."""

    def __init__(self, random_bytes: Callable[[int], bytes] | None) -> None:
        self._random_bytes = random_bytes
        self._by_framing: dict[Framing, TextEvents] = {}

    def of(self, framing: Framing) -> TextEvents:
        known = self._by_framing.get(framing)
        if known is None:
            known = self._by_framing[framing] = self._made(framing)
        return known

    def _made(self, framing: Framing) -> TextEvents:
        if self._random_bytes is None:
            return TextEvent(framing, lambda text: RunFrame(response=text))
        return PaddedTextEvent(framing, self._random_bytes)


def _encoder(text_events: _TextEvents, body: RunRequest, context: ResponseContext) -> Encoder:
    pairs = body.pairs
    if pairs is not None:
        return RerankEncoder(context, pairs, body.top_k)
    framing = context.framing
    if not body.is_embedding:
        return RunEncoder(
            framing,
            text_events.of(framing),
            lambda: context.merger.warnings,
            is_json=body.is_json,
        )
    return EmbeddingEncoder(
        framing,
        context.merger,
        body.pooling or DEFAULT_POOLING,
        is_normalized=body.normalize is not False,
    )

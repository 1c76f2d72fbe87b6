"""The endpoints of OpenAI's API that generate."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from services.gateway.openai import chat, completions, embeddings
from services.gateway.openai.chat_response import ChatEncoder
from services.gateway.openai.completion_response import CompletionEncoder
from services.gateway.openai.embedding_response import EmbeddingEncoder
from services.gateway.openai.messages import ChatMessage
from services.gateway.request.endpoint import Endpoint

NO_MESSAGES = [ChatMessage(role="user", content="")]


def _without_prompts(body: Any, count: int, *, field: str) -> Any:
    empty = "" if count == 1 else [""] * count
    return msgspec.structs.replace(body, **{field: empty})


CHAT = Endpoint(
    name="chat",
    fields=chat.CHAT_FIELDS,
    generations=lambda body, model: [chat.to_generation_request(body, model)],
    is_streamed=lambda body: bool(body.stream),
    encoder=ChatEncoder.of,
    without_prompts=lambda body, _: msgspec.structs.replace(body, messages=NO_MESSAGES),
)
COMPLETIONS = Endpoint(
    name="completions",
    fields=completions.COMPLETION_FIELDS,
    generations=completions.to_generation_requests,
    is_streamed=lambda body: bool(body.stream),
    encoder=CompletionEncoder.of,
    without_prompts=partial(_without_prompts, field="prompt"),
)
EMBEDDINGS = Endpoint(
    name="embeddings",
    fields=embeddings.EMBEDDING_FIELDS,
    generations=embeddings.to_generation_requests,
    is_streamed=lambda _: False,
    encoder=EmbeddingEncoder.of,
    without_prompts=partial(_without_prompts, field="input"),
)

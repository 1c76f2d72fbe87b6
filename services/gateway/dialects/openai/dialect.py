"""OpenAI's API as a dialect: its endpoints that generate."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from services.gateway.dialects.dialect import Dialect
from services.gateway.dialects.openai import chat, completions, embeddings
from services.gateway.dialects.openai.chat_response import ChatEncoder
from services.gateway.dialects.openai.completion_response import CompletionEncoder
from services.gateway.dialects.openai.embedding_response import EmbeddingEncoder
from services.gateway.dialects.openai.errors import ErrorEnvelope, encode_error
from services.gateway.dialects.openai.messages import ChatMessage
from services.gateway.dialects.paths import openai_paths
from services.gateway.request.endpoint import GeneratingEndpoint

NO_MESSAGES = [ChatMessage(role="user", content="")]


def _without_prompts(body: Any, count: int, *, field: str) -> Any:
    empty = "" if count == 1 else [""] * count
    return msgspec.structs.replace(body, **{field: empty})


CHAT = GeneratingEndpoint(
    name="chat",
    operation="chat_completions",
    summary="Answers a conversation",
    description=(
        "With `stream`, the response is server-sent events of `chat.completion.chunk`, and then "
        "`[DONE]`."
    ),
    example={"messages": [{"role": "user", "content": "What is the KV cache?"}], "max_tokens": 100},
    paths=openai_paths("/chat/completions"),
    request=chat.ChatCompletionRequest,
    response=chat.ChatCompletion,
    event=chat.ChatCompletionChunk,
    takes_images=True,
    fields=chat.CHAT_FIELDS,
    generations=lambda body, model: [chat.to_generation_request(body, model)],
    is_streamed=lambda body: bool(body.stream),
    encoder=ChatEncoder.of,
    without_prompts=lambda body, _: msgspec.structs.replace(body, messages=NO_MESSAGES),
)
COMPLETIONS = GeneratingEndpoint(
    name="completions",
    operation="completions",
    summary="Continues a text",
    description=(
        "Without chat template. With `stream`, the response is server-sent events of "
        "`text_completion`, and then `[DONE]`."
    ),
    example={"prompt": "The KV cache stores", "max_tokens": 20},
    paths=openai_paths("/completions"),
    request=completions.CompletionRequest,
    response=completions.Completion,
    event=completions.CompletionChunk,
    fields=completions.COMPLETION_FIELDS,
    generations=completions.to_generation_requests,
    is_streamed=lambda body: bool(body.stream),
    encoder=CompletionEncoder.of,
    without_prompts=partial(_without_prompts, field="prompt"),
)
EMBEDDINGS = GeneratingEndpoint(
    name="embeddings",
    operation="embeddings",
    summary="Turns texts into vectors",
    description="Of the model's last hidden state: of the last token, or the mean of all.",
    example={"input": ["a text", "another one"]},
    paths=openai_paths("/embeddings"),
    request=embeddings.EmbeddingRequest,
    response=embeddings.EmbeddingList,
    fields=embeddings.EMBEDDING_FIELDS,
    generations=embeddings.to_generation_requests,
    for_model=embeddings.for_model,
    is_streamed=lambda _: False,
    encoder=EmbeddingEncoder.of,
    without_prompts=partial(_without_prompts, field="input"),
)
DIALECT = Dialect(
    name="openai",
    title="OpenAI: completions and embeddings",
    about="OpenAI's SDKs work with the address of a gateway and `/v1` as their base URL.",
    endpoints=(CHAT, COMPLETIONS, EMBEDDINGS),
    encode_error=encode_error,
    error=ErrorEnvelope,
)

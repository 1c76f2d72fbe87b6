"""The endpoints of OpenAI's API that generate."""

from __future__ import annotations

from services.gateway.openai import chat, completions, embeddings
from services.gateway.openai.chat_response import ChatEncoder
from services.gateway.openai.completion_response import CompletionEncoder
from services.gateway.openai.embedding_response import EmbeddingEncoder
from services.gateway.request.endpoint import Endpoint

NO_MESSAGES = [chat.ChatMessage(role="user", content="")]


def _texts(count: int) -> str | list[str]:
    return "" if count == 1 else [""] * count


CHAT = Endpoint(
    name="chat",
    fields=chat.CHAT_FIELDS,
    generations=lambda body, model, _: [chat.to_generation_request(body, model)],
    is_streamed=lambda body: bool(body.stream),
    encoder=ChatEncoder.of,
    prompt_field="messages",
    empty=lambda _: NO_MESSAGES,
)
COMPLETIONS = Endpoint(
    name="completions",
    fields=completions.COMPLETION_FIELDS,
    generations=lambda body, model, _: completions.to_generation_requests(body, model),
    is_streamed=lambda body: bool(body.stream),
    encoder=CompletionEncoder.of,
    prompt_field="prompt",
    empty=_texts,
)
EMBEDDINGS = Endpoint(
    name="embeddings",
    fields=embeddings.EMBEDDING_FIELDS,
    generations=embeddings.to_generation_requests,
    is_streamed=lambda _: False,
    encoder=EmbeddingEncoder.of,
    prompt_field="input",
    empty=_texts,
)

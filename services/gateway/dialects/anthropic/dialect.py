"""Anthropic's API as a dialect."""

from __future__ import annotations

from services.gateway.dialects.anthropic.errors import AnthropicErrorEnvelope, encode_error
from services.gateway.dialects.anthropic.request import (
    MESSAGES_FIELDS,
    MessagesRequest,
    PromptFields,
    to_generation_requests,
    without_prompts,
)
from services.gateway.dialects.anthropic.response import MessageEncoder
from services.gateway.dialects.anthropic.response_types import (
    MessageResponse,
    StreamEvent,
    TokenCount,
)
from services.gateway.dialects.anthropic.signature import signing_state
from services.gateway.dialects.anthropic.token_count import COUNT_TOKENS, TokenCounter, count_large
from services.gateway.dialects.dialect import REQUEST_ID, Dialect, DialectParts, OpenDialect
from services.gateway.request.endpoint import ERRORS, Endpoint, GeneratingEndpoint
from shared.secrets.root_key import root_key_of

PATH = "/v1/messages"

MESSAGES = GeneratingEndpoint(
    name="messages",
    operation="messages",
    summary="Answers a conversation",
    description="With `stream`, the response is the server-sent events of Anthropic's API.",
    example={
        "model": "hearth-demo",
        "max_tokens": 100,
        "messages": [{"role": "user", "content": "What is the KV cache?"}],
    },
    paths=(PATH,),
    request=MessagesRequest,
    response=MessageResponse,
    event=StreamEvent,
    errors=(*ERRORS, 529),
    takes_images=True,
    fields=MESSAGES_FIELDS,
    generations=to_generation_requests,
    is_streamed=lambda body: bool(body.stream),
    encoder=MessageEncoder.of,
    without_prompts=without_prompts,
    is_for_session=True,
)
COUNT = Endpoint(
    name=COUNT_TOKENS,
    operation="count_tokens",
    summary="Counts the tokens of a prompt",
    description=f"The prompt that the same request to `{PATH}` would have. No model runs.",
    example={
        "model": "hearth-demo",
        "messages": [{"role": "user", "content": "What is the KV cache?"}],
    },
    paths=(f"{PATH}/count_tokens",),
    request=PromptFields,
    takes_images=True,
    response=TokenCount,
    errors=(*ERRORS, 529),
    is_on_nats=False,
)


def _open(parts: DialectParts) -> OpenDialect:
    counter = TokenCounter(parts.preparer, parts.models.names)
    key = root_key_of(parts.config.secret("cluster_secret"))
    return OpenDialect(
        answers={COUNT_TOKENS: counter.count}, states={MESSAGES.name: signing_state(key)}
    )


DIALECT = Dialect(
    name="anthropic",
    title="Anthropic: Messages",
    about=(
        "Anthropic's SDKs and Claude Code work with the address of a gateway, without `/v1`, as "
        "their base URL, and the API key in `x-api-key` or as a bearer."
    ),
    endpoints=(MESSAGES, COUNT),
    encode_error=encode_error,
    error=AnthropicErrorEnvelope,
    owns=lambda path: path == PATH or path.startswith(f"{PATH}/"),
    request_id_headers=(REQUEST_ID, "request-id"),  # the second is where its clients look
    jobs={COUNT_TOKENS: count_large},
    open=_open,
)

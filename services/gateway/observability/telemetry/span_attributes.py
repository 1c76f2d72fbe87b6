"""The GenAI attributes of a request's span. They contain no text of the client."""

from __future__ import annotations

from hashlib import blake2b

from shared.messages import Request


def span_attributes(
    request: Request, *, is_chat: bool, is_json: bool, affinity_key: str
) -> dict[str, str | int | float | bool]:
    """Returns the attributes of a request. `affinity_key` is that of the tenant's session, or
    empty. Stop sequences are left out: they are a client's text.
    """
    attributes: dict[str, str | int | float | bool] = {
        "gen_ai.operation.name": _operation(request, is_chat=is_chat),
        "gen_ai.request.choice.count": len(request.choices),
    }
    sampling = request.sampling
    if request.pooling is None:
        attributes |= {
            "gen_ai.output.type": "json" if is_json else "text",
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k,
            # OTLP has signed integers
            "gen_ai.request.seed": sampling.seed & (2**63 - 1),
        }
    if affinity_key:
        hashed = blake2b(affinity_key.encode(), digest_size=16).hexdigest()
        attributes["gen_ai.conversation.id"] = hashed
    return attributes


def _operation(request: Request, *, is_chat: bool) -> str:
    if request.pooling is not None:
        return "embeddings"
    return "chat" if is_chat else "text_completion"

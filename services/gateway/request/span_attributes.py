"""The GenAI attributes of a request's span. They hold no text of the client."""

from __future__ import annotations

from hashlib import blake2b

from services.gateway.request.generation_request import GenerationRequest, scoped_affinity_key
from shared.messages import Request


def span_attributes(
    generation: GenerationRequest, request: Request
) -> dict[str, str | int | float | bool]:
    """Stop sequences are left out: they are a client's text."""
    sampling = request.sampling
    attributes: dict[str, str | int | float | bool] = {
        "gen_ai.operation.name": _operation(generation),
        "gen_ai.request.choice.count": len(request.choices),
    }
    if request.pooling is None:
        attributes |= {
            "gen_ai.output.type": "text" if generation.output is None else "json",
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k,
            # OTLP has signed integers
            "gen_ai.request.seed": sampling.seed & (2**63 - 1),
        }
    if generation.affinity_key:
        scoped = scoped_affinity_key(request.tenant_id, generation.affinity_key)
        hashed = blake2b(scoped.encode(), digest_size=16).hexdigest()
        attributes["gen_ai.conversation.id"] = hashed
    return attributes


def _operation(generation: GenerationRequest) -> str:
    if generation.pooling is not None:
        return "embeddings"
    return "text_completion" if generation.continues_text else "chat"

"""The GenAI attributes of a request's span. They hold no text of the client."""

from __future__ import annotations

from shared.messages import Request


def span_attributes(
    request: Request, *, operation: str, output_type: str, conversation: str
) -> dict[str, str | int | float | bool]:
    """`conversation`: a hash; empty: unknown. Stop sequences are a client's text: left out."""
    sampling = request.sampling
    attributes: dict[str, str | int | float | bool] = {
        "gen_ai.operation.name": operation,
        "gen_ai.request.choice.count": len(request.choices),
    }
    if request.pooling is None:
        attributes |= {
            "gen_ai.output.type": output_type,
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k,
            "gen_ai.request.seed": sampling.seed,
        }
    if conversation:
        attributes["gen_ai.conversation.id"] = conversation
    return attributes

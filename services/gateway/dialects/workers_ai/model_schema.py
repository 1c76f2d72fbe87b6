"""Returns the JSON Schemas of `ai/models/schema`, generated from the types that decode a run."""

from __future__ import annotations

from functools import cache
from typing import Any

from services.gateway.dialects.workers_ai.embedding_response import EmbeddingResult
from services.gateway.dialects.workers_ai.rerank_response import WorkersAIRerankResult
from services.gateway.dialects.workers_ai.run_request import RunRequest
from services.gateway.dialects.workers_ai.run_response import RunFrame
from services.gateway.schemas.struct_schemas import described_schemas

REF_TEMPLATE = "#/$defs/{name}"


@cache
def model_schema() -> dict[str, Any]:
    """Returns the schemas of the input and output of every model, each with its own definitions."""
    return {
        "input": _schema(
            (RunRequest,), "One of messages, prompt, text, and query with contexts; with options"
        ),
        "output": _schema(
            (RunFrame, EmbeddingResult, WorkersAIRerankResult),
            "A text, or vectors for an input with `text`, or scores for a `query`",
        ),
    }


def _schema(types: tuple[type[Any], ...], description: str) -> dict[str, Any]:
    references, components = described_schemas(types, REF_TEMPLATE)
    named = [each.__name__ for each in types]
    if len(types) == 1:
        shape = components.pop(named[0])
    else:
        shape = {"type": "object", "oneOf": list(references)}
    shape |= {"description": description, "additionalProperties": True}
    return {**shape, "$defs": components}

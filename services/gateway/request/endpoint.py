"""One kind of request of a dialect: its body becomes requests, and their output its response."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from services.gateway.output.encoder import Encoder
from services.gateway.output.framing import Framing
from services.gateway.request.generation_request import GenerationRequest
from services.gateway.request.output_merger import OutputMerger
from services.gateway.request.supported_fields import SupportedFields
from services.gateway.text.model_files import ModelFiles, RankingTokens
from services.gateway.text.token_bytes import TokenBytes

Requests = Sequence[GenerationRequest]


@dataclass(frozen=True, slots=True)
class ResponseContext:
    """What an encoder knows besides the body. `model`: as the client named it. `created`: seconds
    since 1970. `ranking`: of a reranking checkpoint. `signing_key`: of the tenant.
    """

    merger: OutputMerger
    token_bytes: TokenBytes
    request_id: str
    model: str
    created: int
    framing: Framing
    ranking: RankingTokens | None = None
    signing_key: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """`name`: by which a preparation process finds it. `without_prompts`: the body with a number of
    empty prompts.
    """

    name: str
    fields: SupportedFields
    # body, default model → one request per prompt; raises InvalidRequest
    generations: Callable[[Any, str], Requests]
    is_streamed: Callable[[Any], bool]
    encoder: Callable[[Any, ResponseContext], Encoder]
    without_prompts: Callable[[Any, int], Any]
    # body, its requests, the model's files → the requests that this model gets
    for_model: Callable[[Any, Requests, ModelFiles], Requests] = lambda _, generations, __: (
        generations
    )

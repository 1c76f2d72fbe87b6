"""`/tokenize` and `/detokenize` as a dialect, in vLLM's shapes."""

from __future__ import annotations

from services.gateway.dialects.dialect import Dialect, DialectParts, OpenDialect
from services.gateway.dialects.openai.errors import ErrorEnvelope, encode_error
from services.gateway.dialects.tokenization.bodies import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from services.gateway.dialects.tokenization.large_bodies import DETOKENIZE, TOKENIZE, answer
from services.gateway.dialects.tokenization.routes import TokenizerInfoRoute
from services.gateway.dialects.tokenization.tokenization import Tokenization
from services.gateway.request.endpoint import Endpoint


def _open(parts: DialectParts) -> OpenDialect:
    tokenization = Tokenization(parts.preparer, parts.models.names)
    return OpenDialect(
        answers={TOKENIZE: tokenization.tokenize, DETOKENIZE: tokenization.detokenize},
        handlers=TokenizerInfoRoute(tokenization).handlers,
    )


DIALECT = Dialect(
    name="openai",
    title="Tokens",
    about="In the form of vLLM. A request costs no tokens.",
    endpoints=(
        Endpoint(
            name=TOKENIZE,
            operation="tokenize",
            summary="Turns a text into tokens",
            example={"prompt": "a text"},
            description=(
                "The tokens of a prompt, or of messages as the model's chat template renders them."
            ),
            paths=("/tokenize", "/v1/tokenize"),
            request=TokenizeRequest,
            takes_images=True,
            response=TokenizeResponse,
        ),
        Endpoint(
            name=DETOKENIZE,
            operation="detokenize",
            summary="Turns tokens into a text",
            example={"tokens": [1, 2, 3]},
            description="The text of tokens, with the texts of special tokens.",
            paths=("/detokenize", "/v1/detokenize"),
            request=DetokenizeRequest,
            response=DetokenizeResponse,
        ),
    ),
    encode_error=encode_error,
    error=ErrorEnvelope,
    jobs=dict.fromkeys((TOKENIZE, DETOKENIZE), answer),
    open=_open,
)

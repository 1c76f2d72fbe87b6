"""Tokenizes and detokenizes for a tenant, on any transport: bodies in, bodies out.

    small ──▶ decode ──▶ convert, messages after a preparation process rendered them ──▶ encode
    large ──▶ decode, render, convert and encode in a preparation process

Nothing here is charged: the caller reserves the request.
"""

from __future__ import annotations

import msgspec

from services.gateway.catalog import Catalog
from services.gateway.request.submission import Submission
from services.gateway.tenancy.model_aliases import ModelAliases
from services.gateway.tenancy.permissions import check_model
from services.gateway.text.tokenizer import PromptTokenizer
from services.gateway.tokenization.bodies import (
    DETOKENIZE_FIELDS,
    TOKENIZE_FIELDS,
    TokenizeRequest,
    check_tokenize,
    prompt_of,
)
from services.gateway.tokenization.conversion import detokenize, tokenize
from services.gateway.tokenization.large_bodies import DETOKENIZE, TOKENIZE
from shared.errors import InvalidRequest, PayloadTooLarge
from shared.messages import ModelCard
from shared.tenancy.tenant import TenantRecord

MAX_BODY_BYTES = 1 << 20
MAX_INLINE_BYTES = 8 << 10  # some 2 ms of decoding, converting and encoding on the event loop


class _Model(msgspec.Struct, frozen=True):
    """Reads the model of a body, and skips the rest in some 0.5 ms for a MiB."""

    model: str | None = None


_model_decoder = msgspec.json.Decoder(_Model)


class Tokenization:
    """Both methods return the response as JSON. They raise the HearthError that rejects the
    request: InvalidRequest and its subclasses, ModelNotAllowed, Overloaded, NoCapacity, and
    DependencyUnavailable for a model's name that cannot be checked.
    """

    def __init__(
        self,
        submission: Submission,
        catalog: Catalog,
        tokenizer: PromptTokenizer,
        aliases: ModelAliases,
    ) -> None:
        self._submission = submission
        self._catalog = catalog
        self._tokenizer = tokenizer
        self._aliases = aliases

    async def tokenize(self, tenant: TenantRecord, data: bytes) -> bytes:
        if len(data) > MAX_INLINE_BYTES:
            return await self._answer_large(tenant, TOKENIZE, data)
        body: TokenizeRequest = TOKENIZE_FIELDS.decode(data)
        card = await self._card(tenant, body.model)
        response = tokenize(
            body,
            self._tokenizer,
            max_model_len=card.max_context_tokens,
            chat_token_ids=await self._chat_tokens(tenant, body),
        )
        return msgspec.json.encode(response)

    async def detokenize(self, tenant: TenantRecord, data: bytes) -> bytes:
        if len(data) > MAX_INLINE_BYTES:
            return await self._answer_large(tenant, DETOKENIZE, data)
        body = DETOKENIZE_FIELDS.decode(data)
        card = await self._card(tenant, body.model)
        response = detokenize(body, self._tokenizer, vocab_size=card.vocab_size)
        return msgspec.json.encode(response)

    async def _chat_tokens(self, tenant: TenantRecord, body: TokenizeRequest) -> list[int] | None:
        if body.messages is None:
            return None
        check_tokenize(body)
        prompt = prompt_of(body)
        return await self._submission.tokenize(
            tenant.tenant_id,
            prompt.messages,
            prompt.tools,
            add_generation_prompt=body.add_generation_prompt is not False,
            variables=prompt.variables,
        )

    async def _answer_large(self, tenant: TenantRecord, kind: str, data: bytes) -> bytes:
        if len(data) > MAX_BODY_BYTES:
            raise PayloadTooLarge(f"the request body is larger than {MAX_BODY_BYTES} bytes")
        model = _model_of(data)
        if model is not None:
            await self._card(tenant, model.model)
        prepared = await self._submission.prepare_body(tenant, kind, data)
        if model is None:  # not reached: the process rejects what cannot be read here
            raise InvalidRequest("the body is not valid JSON")
        return prepared.body

    async def _card(self, tenant: TenantRecord, model: str | None) -> ModelCard:
        own = self._catalog.name
        if model is not None and await self._aliases.resolve(tenant.tenant_id, model) != own:
            return self._catalog.card(model)  # raises UnknownModel
        check_model(tenant, own)
        return self._catalog.card(own)


def _model_of(data: bytes) -> _Model | None:
    """None for a body that is not valid: the process finds the field at fault."""
    try:
        return _model_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None

"""Tokenizes and detokenizes for a tenant, on any transport: bodies in, bodies out.

    small ──▶ decode ──▶ render and tokenize in other processes ──▶ encode
    large ──▶ decode, render, convert and encode in a preparation process

Nothing here is charged: the caller reserves the request.
"""

from __future__ import annotations

import msgspec

from services.gateway.dialects.tokenization.bodies import (
    DETOKENIZE_FIELDS,
    TOKENIZE_FIELDS,
    TokenizeRequest,
    TokenizerInfo,
    check_tokenize,
    prompt_of,
)
from services.gateway.dialects.tokenization.conversion import detokenize, tokenize
from services.gateway.dialects.tokenization.large_bodies import DETOKENIZE, TOKENIZE
from services.gateway.models.model_names import ModelNames
from services.gateway.models.served_text import ServedModel
from services.gateway.request.preparer import Preparer
from shared.errors import PayloadTooLarge
from shared.tenancy.tenant import TenantRecord
from shared.tokenizer.special_tokens import STANDARD

MAX_BODY_BYTES = 1 << 20
MAX_INLINE_BYTES = 8 << 10  # some 2 ms of decoding, converting and encoding on the event loop


class Tokenization:
    """`tokenize` and `detokenize` return the response as JSON. All raise the HearthError that
    rejects the request: InvalidRequest and its subclasses, ModelNotAllowed, Overloaded, NoCapacity,
    and DependencyUnavailable for a model's name that cannot be checked.
    """

    def __init__(self, preparer: Preparer, names: ModelNames) -> None:
        self._preparer = preparer
        self._names = names

    async def tokenize(self, tenant: TenantRecord, data: bytes) -> bytes:
        if len(data) > MAX_INLINE_BYTES:
            return await self._answer_large(tenant, TOKENIZE, data)
        body: TokenizeRequest = TOKENIZE_FIELDS.decode(data)
        model = await self._names.main(tenant, body.model or None)
        token_ids = await self._token_ids(tenant, model, body)
        most = model.card.max_context_tokens
        response = tokenize(body, token_ids, model.text.files.tokens, max_model_len=most)
        return msgspec.json.encode(response)

    async def detokenize(self, tenant: TenantRecord, data: bytes) -> bytes:
        if len(data) > MAX_INLINE_BYTES:
            return await self._answer_large(tenant, DETOKENIZE, data)
        body = DETOKENIZE_FIELDS.decode(data)
        self._preparer.check_capacity()
        model = await self._names.main(tenant, body.model or None)
        response = detokenize(body, model.text.files.tokens, vocab_size=model.card.vocab_size)
        return msgspec.json.encode(response)

    async def info(self, tenant: TenantRecord, name: str | None) -> TokenizerInfo:
        """Returns what `/tokenizer_info` shows. `name`: of a model; None: the gateway's own."""
        model = await self._names.main(tenant, name or None)
        files = model.text.files
        template = files.chat_template
        return TokenizerInfo(
            model=model.card.name,
            chat_template=None if template is None else template.source,
            model_max_length=model.card.max_context_tokens,
            **{name: files.token_texts.get(name) for name in STANDARD},
        )

    async def _token_ids(
        self, tenant: TenantRecord, model: ServedModel, body: TokenizeRequest
    ) -> list[int]:
        check_tokenize(body)
        if body.messages is None:
            return await self._preparer.tokenize_text(
                model.text,
                tenant.tenant_id,
                body.prompt or "",
                adds_special_tokens=body.add_special_tokens is not False,
            )
        return await self._preparer.tokenize_chat(
            model,
            tenant.tenant_id,
            prompt_of(body),
            add_generation_prompt=body.add_generation_prompt is not False,
        )

    async def _answer_large(self, tenant: TenantRecord, kind: str, data: bytes) -> bytes:
        named = await self._preparer.named_model(tenant.tenant_id, kind, data)
        model = await self._names.main(tenant, named or None)
        may_be_larger = kind == TOKENIZE and model.text.files.images is not None
        if len(data) > MAX_BODY_BYTES and not may_be_larger:
            raise PayloadTooLarge(f"the request body is larger than {MAX_BODY_BYTES} bytes")
        prepared = await self._preparer.prepare_body(
            tenant, model, kind, data, has_pixels=False, max_text_bytes=MAX_BODY_BYTES
        )
        return prepared.body

"""Counts the tokens of the prompt that `/v1/messages` would render. Runs no model and charges
nothing.

small ──▶ decode ──▶ render and tokenize in other processes
large ──▶ all of it in a preparation process
"""

from __future__ import annotations

import msgspec

from services.gateway.dialects.anthropic.request import COUNT_FIELDS, PromptFields, request_of
from services.gateway.dialects.anthropic.response_types import TokenCount
from services.gateway.models.model_names import ModelNames
from services.gateway.request.prepared_bodies import is_small, tokens_of_chat
from services.gateway.request.preparer import Preparer
from services.gateway.request.prompt import ChatPrompt
from services.gateway.text.chat_template import ChatTemplate
from services.gateway.text.model_files import ModelFiles
from services.gateway.text.process_jobs import BodyJob, PreparedBody
from shared.tenancy.tenant import TenantRecord

COUNT_TOKENS = "count_tokens"  # the kind of a large body


class TokenCounter:
    """Counts over any transport. `count` raises the HearthError that rejects the request."""

    def __init__(self, preparer: Preparer, names: ModelNames) -> None:
        self._preparer = preparer
        self._names = names

    async def count(self, tenant: TenantRecord, data: bytes) -> bytes:
        """Returns the response as JSON."""
        if not is_small(data):
            named = await self._preparer.named_model(tenant.tenant_id, COUNT_TOKENS, data)
            model = await self._names.main(tenant, named or "")
            prepared = await self._preparer.prepare_body(
                tenant, model, COUNT_TOKENS, data, has_pixels=False
            )
            return prepared.body
        body: PromptFields = COUNT_FIELDS.decode(data)
        prompt = _prompt_of(body)
        model = await self._names.main(tenant, body.model)
        token_ids = await self._preparer.tokenize_chat(model, tenant.tenant_id, prompt)
        return msgspec.json.encode(TokenCount(len(token_ids)))


def _prompt_of(body: PromptFields) -> ChatPrompt:
    prompt = request_of(body).prompt
    assert isinstance(prompt, ChatPrompt), "of a conversation"
    return prompt


def count_large(job: BodyJob, files: ModelFiles, template: ChatTemplate | None) -> PreparedBody:
    """Counts in a preparation process. Returns the body of the response. Raises InvalidRequest and
    its subclasses.
    """
    body: PromptFields = COUNT_FIELDS.decode(job.body)
    token_ids = tokens_of_chat(_prompt_of(body), job, files, template)
    return PreparedBody(msgspec.json.encode(TokenCount(len(token_ids))), [])

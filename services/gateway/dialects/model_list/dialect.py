"""The list of models as a dialect, in a form for OpenAI's and Anthropic's clients."""

from __future__ import annotations

import msgspec

from services.gateway.dialects.dialect import Dialect, DialectParts, OpenDialect
from services.gateway.dialects.model_list.model_list import ModelList, TenantModels
from services.gateway.dialects.model_list.routes import ModelRoutes
from services.gateway.dialects.openai.errors import ErrorEnvelope, encode_error
from services.gateway.request.endpoint import Endpoint
from shared.tenancy.tenant import TenantRecord


class NoFields(msgspec.Struct, frozen=True):
    """An empty body, or any: it is not read."""


MODELS = Endpoint(name="models", request=NoFields, response=ModelList, is_free=True)


def _open(parts: DialectParts) -> OpenDialect:
    models = TenantModels(parts.models, created=int(parts.wall_clock()))

    async def answer(tenant: TenantRecord, _: bytes) -> bytes:
        return msgspec.json.encode(await models.all(tenant))

    return OpenDialect(answers={MODELS.name: answer}, handlers=ModelRoutes(models).handlers)


DIALECT = Dialect(
    name="openai",
    title="Models",
    about="In a form for OpenAI's and Anthropic's clients.",
    endpoints=(MODELS,),
    encode_error=encode_error,
    error=ErrorEnvelope,
    open=_open,
)

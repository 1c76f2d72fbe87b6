"""OpenAI's Responses as a dialect."""

from __future__ import annotations

from dataclasses import dataclass

from services.gateway.dialects.dialect import Dialect, DialectParts, OpenDialect
from services.gateway.dialects.openai.errors import ErrorEnvelope, encode_error
from services.gateway.dialects.responses.endpoints import CREATE
from services.gateway.dialects.responses.routes import ResponsesRoutes
from services.gateway.dialects.responses.storage import references
from services.gateway.dialects.responses.storage.completion import BodyCompletion
from services.gateway.dialects.responses.storage.seal import Seal
from services.gateway.dialects.responses.storage.store import ResponseStore
from services.gateway.text.process_jobs import PreparedBody


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenResponsesDialect(OpenDialect):
    store: ResponseStore


def _open(parts: DialectParts) -> OpenDialect:
    config, stores, memory = parts.config, parts.tenancy.stores, parts.tenancy.redis_memory
    store = ResponseStore(
        stores.slow,
        parts.clock,
        region=config.region,
        region_classes=config.own_classes,
        now=parts.wall_clock,
        count=parts.metrics.count_stored_response,
        ttl_s=config.response_ttl_s,
        max_all_bytes=lambda: memory.max_response_bytes,
        bulk=stores.bulk,
        on_refused=parts.tenancy.refusal_audit.refused,
        latest=parts.tenancy.copied.latest,
    )
    secret = config.secret("cluster_secret")
    seal = Seal(secret, parts.randomness.bytes) if secret.current else None
    completion = BodyCompletion(store, seal, config.max_body_bytes)
    return OpenResponsesDialect(
        store=store,
        states={CREATE.name: completion.state},
        handlers=ResponsesRoutes(store, parts.preparer, parts.models).handlers,
        stop=store.stop,
    )


DIALECT = Dialect(
    name="openai",
    title="OpenAI: Responses",
    about="Conversations that continue a stored response; Codex works with this API.",
    endpoints=(CREATE,),
    encode_error=encode_error,
    error=ErrorEnvelope,
    jobs={
        references.KIND: lambda job, *_: PreparedBody(references.encoded_references(job.body), [])
    },
    open=_open,
)

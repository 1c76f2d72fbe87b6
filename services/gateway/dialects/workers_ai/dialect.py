"""Workers AI as a dialect."""

from __future__ import annotations

from services.gateway.dialects.dialect import Dialect, DialectParts, OpenDialect
from services.gateway.dialects.workers_ai.endpoints import RUN, RunState
from services.gateway.dialects.workers_ai.errors import WorkersAIErrorEnvelope, encode_error
from services.gateway.dialects.workers_ai.paths import has_own_envelope
from services.gateway.dialects.workers_ai.routes import WorkersAIRoutes
from services.gateway.request.endpoint import EndpointState


def _open(parts: DialectParts) -> OpenDialect:
    state = RunState(parts.randomness.bytes if parts.config.padding else None)
    return OpenDialect(
        states={RUN.name: EndpointState(lambda _: state)},
        handlers=lambda http: WorkersAIRoutes(http, parts.models).handlers(),
    )


DIALECT = Dialect(
    name="workers_ai",
    title="Workers AI",
    about=(
        "The calls of Cloudflare's documentation work with another host. `{account}` is the tenant "
        "of the key."
    ),
    endpoints=(RUN,),
    encode_error=encode_error,
    error=WorkersAIErrorEnvelope,
    owns=has_own_envelope,
    open=_open,
)

"""The dialects of the API: a new one is a folder and one line here."""

from __future__ import annotations

from services.gateway.dialects.anthropic import dialect as anthropic
from services.gateway.dialects.dialect import Answers, Dialect, Job
from services.gateway.dialects.openai import dialect as openai
from services.gateway.dialects.prefixes import dialect as prefixes
from services.gateway.dialects.ranking import dialect as reranking
from services.gateway.dialects.responses import dialect as responses
from services.gateway.dialects.tokenization import dialect as tokenization
from services.gateway.dialects.workers_ai import dialect as workers_ai
from services.gateway.models.model_names import ModelNames
from services.gateway.request.endpoint import GeneratingEndpoint
from services.gateway.request.preparer import Preparer

DIALECTS: tuple[Dialect, ...] = (
    openai.DIALECT,
    reranking.DIALECT,
    anthropic.DIALECT,
    responses.DIALECT,
    tokenization.DIALECT,
    prefixes.DIALECT,
    workers_ai.DIALECT,
)
GENERATING: dict[str, GeneratingEndpoint] = {
    endpoint.name: endpoint
    for dialect in DIALECTS
    for endpoint in dialect.endpoints
    if isinstance(endpoint, GeneratingEndpoint)
}
JOBS: dict[str, Job] = {kind: job for dialect in DIALECTS for kind, job in dialect.jobs.items()}


def dialect_of(path: str) -> Dialect:
    """Returns the dialect in whose form the errors of an HTTP path are."""
    return next((each for each in DIALECTS if each.owns(path)), openai.DIALECT)


def answers(preparer: Preparer, names: ModelNames) -> Answers:
    """Returns what answers the endpoints of all dialects that do not generate."""
    found = (dialect.answers(preparer, names) for dialect in DIALECTS)
    return {name: answer for each in found for name, answer in each.items()}

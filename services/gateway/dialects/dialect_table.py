"""The dialects of the API: a new one is a folder and one line here."""

from __future__ import annotations

from services.gateway.dialects.anthropic import dialect as anthropic
from services.gateway.dialects.dialect import Dialect
from services.gateway.dialects.model_list import dialect as model_list
from services.gateway.dialects.openai import dialect as openai
from services.gateway.dialects.prefixes import dialect as prefixes
from services.gateway.dialects.ranking import dialect as ranking
from services.gateway.dialects.receipts import dialect as receipts
from services.gateway.dialects.responses import dialect as responses
from services.gateway.dialects.tokenization import dialect as tokenization
from services.gateway.dialects.workers_ai import dialect as workers_ai

# The first is the dialect of paths that no dialect owns.
DIALECTS: tuple[Dialect, ...] = tuple(
    each.DIALECT
    for each in (
        openai,
        ranking,
        anthropic,
        responses,
        tokenization,
        prefixes,
        receipts,
        workers_ai,
        model_list,
    )
)

"""The models that a tenant may use, as OpenAI lists them."""

from __future__ import annotations

import msgspec

from services.gateway.catalog import Catalog
from services.gateway.tenancy.permissions import may_use
from shared.messages import ModelCard
from shared.tenancy.tenant import TenantRecord


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "hearth"
    max_context: int
    revision: str


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[ModelEntry]


def entry_of(card: ModelCard, created: int) -> ModelEntry:
    return ModelEntry(
        id=card.name,
        created=created,
        max_context=card.max_context_tokens,
        revision=card.revision,
    )


def models_of(tenant: TenantRecord, catalog: Catalog, created: int) -> ModelList:
    """`created`: seconds since 1970."""
    cards = [card for card in catalog.cards() if may_use(tenant, card.name)]
    return ModelList(data=[entry_of(card, created) for card in cards])

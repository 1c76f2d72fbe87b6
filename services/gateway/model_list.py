"""The models that a tenant may use, as OpenAI lists them."""

from __future__ import annotations

import msgspec

from services.gateway.catalog import Catalog
from services.gateway.tenancy.model_aliases import ModelAliases
from services.gateway.tenancy.permissions import check_model, may_use
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


class TenantModels:
    """The gateway's model by its name, and by the aliases that a tenant sees. `created`: seconds
    since 1970, of every model.
    """

    def __init__(self, catalog: Catalog, aliases: ModelAliases, created: int) -> None:
        self._catalog = catalog
        self._aliases = aliases
        self._created = created

    async def all(self, tenant: TenantRecord) -> ModelList:
        """Raises DependencyUnavailable if the tenant's aliases have never been read."""
        entries = []
        for card in self._catalog.cards():
            if may_use(tenant, card.name):
                names = await self._aliases.names_of(tenant.tenant_id, card.name)
                entries += [self._entry(name, card) for name in names]
        return ModelList(data=entries)

    async def one(self, tenant: TenantRecord, name: str) -> ModelEntry:
        """Raises UnknownModel for a model that this gateway does not serve, ModelNotAllowed, or
        NoCapacity before any worker serves the model.
        """
        model = await self._aliases.resolve(tenant.tenant_id, name) or name
        if model == self._catalog.name:
            check_model(tenant, model)
        return self._entry(name, self._catalog.card(model))

    def _entry(self, name: str, card: ModelCard) -> ModelEntry:
        return ModelEntry(
            id=name,
            created=self._created,
            max_context=card.max_context_tokens,
            revision=card.revision,
        )

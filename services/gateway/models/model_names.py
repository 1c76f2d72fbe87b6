"""Resolves the names that a tenant may use for the served models: their own, and its aliases."""

from __future__ import annotations

from collections.abc import AsyncIterator

from services.gateway.models.served_models import ServedModels
from services.gateway.models.served_text import ServedModel
from services.gateway.tenancy.model_aliases import ModelAliases
from shared.messages import ModelCard
from shared.tenancy.tenant import TenantRecord


class ModelNames:
    def __init__(self, models: ServedModels, aliases: ModelAliases) -> None:
        self._models = models
        self._aliases = aliases

    async def resolve(self, tenant_id: str, name: str) -> str:
        """Returns the name of the served model that `name` means, or `name` if it means none.
        Raises DependencyUnavailable if the name cannot be checked.
        """
        model = await self._aliases.resolve(tenant_id, name)
        return name if model is None or not self._models.has(tenant_id, model) else model

    async def main(self, tenant: TenantRecord, name: str | None) -> ServedModel:
        """Returns the revision that most of the tenant's requests for `name` get; None names the
        gateway's default. Raises UnknownModel, ModelNotAllowed, NoCapacity, and
        DependencyUnavailable if the name cannot be checked.
        """
        named = self._models.default_name if name is None else name
        resolved = await self.resolve(tenant.tenant_id, named)
        self._models.check(tenant, resolved)
        return await self._models.main(resolved)

    async def all(self, tenant: TenantRecord) -> AsyncIterator[tuple[ModelCard, list[str]]]:
        """Yields the models that the tenant may use, each with its name and then its aliases.
        Raises DependencyUnavailable if the tenant's aliases have never been read.
        """
        for card in self._models.cards(tenant):
            yield card, await self._aliases.names_of(tenant.tenant_id, card.name)

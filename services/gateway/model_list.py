"""The models that a tenant may use, as OpenAI lists them."""

from __future__ import annotations

import msgspec

from services.gateway.models.model_names import ModelNames
from services.gateway.models.served_models import ServedModels
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
    """The models by their names, and by the aliases that a tenant sees. `created`: seconds since
    1970, of every model.
    """

    def __init__(self, models: ServedModels, names: ModelNames, created: int) -> None:
        self._models = models
        self._names = names
        self._created = created

    async def all(self, tenant: TenantRecord) -> ModelList:
        """Raises DependencyUnavailable if the tenant's aliases have never been read."""
        return ModelList(
            data=[
                self._entry(name, card)
                async for card, names in self._names.all(tenant)
                for name in names
            ]
        )

    async def one(self, tenant: TenantRecord, name: str) -> ModelEntry:
        """Raises UnknownModel for a model that this gateway does not serve, ModelNotAllowed, or
        NoCapacity before any worker serves the model.
        """
        model = await self._names.resolve(tenant.tenant_id, name)
        self._models.check(tenant, model)
        return self._entry(name, self._models.card(model))

    def _entry(self, name: str, card: ModelCard) -> ModelEntry:
        return ModelEntry(
            id=name,
            created=self._created,
            max_context=card.max_context_tokens,
            revision=card.revision,
        )

"""The models that this gateway serves: its own, whose files it was given."""

from __future__ import annotations

from services.gateway.catalog import Catalog
from services.gateway.models.served_text import ServedModel, ServedText
from services.gateway.tenancy.permissions import check_model, may_use
from shared.errors import UnknownModel
from shared.messages import ModelCard
from shared.tenancy.tenant import TenantRecord


class ServedModels:
    def __init__(self, catalog: Catalog, own: ServedText) -> None:
        self._catalog = catalog
        self._own = own

    @property
    def default_name(self) -> str:
        """The model of a request that names none."""
        return self._catalog.name

    def has(self, tenant_id: str, name: str) -> bool:
        """Whether `name` is a model that the tenant sees."""
        return name == self._catalog.name

    def check(self, tenant: TenantRecord, name: str) -> None:
        """Raises UnknownModel, ModelNotAllowed."""
        if not self.has(tenant.tenant_id, name):
            raise UnknownModel(f"the model {name!r} does not exist", param="model")
        check_model(tenant, name)

    def serves(self, name: str) -> bool:
        return name == self._catalog.name

    async def choose(self, name: str) -> ServedModel:
        """A revision for a new request. Raises UnknownModel, and NoCapacity if it cannot be served
        now.
        """
        return await self.main(name)

    async def main(self, name: str) -> ServedModel:
        """The revision that most requests get. Raises as `choose`."""
        return ServedModel(self.card(name), self._own)

    def card(self, name: str) -> ModelCard:
        """Of the same revision as `main`. Raises as `choose`."""
        return self._catalog.card(name)

    def cards(self, tenant: TenantRecord) -> list[ModelCard]:
        """Of the models that the tenant may use, if they can be served."""
        return [card for card in self._catalog.cards() if may_use(tenant, card.name)]

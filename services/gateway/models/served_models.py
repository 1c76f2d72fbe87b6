"""The models that this gateway serves: its own, whose files it was given, and the catalogue's.

A name of its own goes before one of the catalogue. A model of the catalogue that a tenant may not
see is for this tenant as one that does not exist.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from services.gateway.models.live_models import Catalog
from services.gateway.models.loaded_texts import LoadedTexts, TextSource
from services.gateway.models.served_text import ServedModel, ServedText
from services.gateway.tenancy.permissions import check_model, may_use
from shared.errors import DependencyUnavailable, InvalidRequest, NoCapacity, UnknownModel
from shared.messages import ModelCard
from shared.model_registry.reader import RegistryReader
from shared.model_registry.record import RegisteredModel, RegisteredRevision
from shared.model_registry.revisions import choose_revision
from shared.randomness import Randomness
from shared.receipts.receipt import ServedWeights
from shared.tenancy.tenant import TenantRecord


class ServedModels:
    def __init__(
        self,
        catalog: Catalog,
        own: ServedText | None,
        registry: RegistryReader,
        texts: LoadedTexts,
        randomness: Randomness,
    ) -> None:
        """`own`: the text of the model `catalog.name`, or None if the gateway has no model of its
        own.
        """
        self._catalog = catalog
        self._own = own
        self._registry = registry
        self._texts = texts
        self._randomness = randomness

    @property
    def default_name(self) -> str:
        """The model of a request that names none; empty if such a request is rejected."""
        return self._catalog.name

    @property
    def names(self) -> set[str]:
        return {*self._registry.models, *filter(None, [self.default_name])}

    def has(self, tenant_id: str, name: str) -> bool:
        """Whether `name` is a model that the tenant sees."""
        if name == self.default_name:
            return True
        model = self._registry.models.get(name)
        return model is not None and (model.tenants is None or tenant_id in model.tenants)

    def serves(self, name: str) -> bool:
        return name in self.names

    def hides(self, tenant_id: str, name: str) -> bool:
        """Whether `name` is a model that the tenant may not see."""
        return self.serves(name) and not self.has(tenant_id, name)

    def check(self, tenant: TenantRecord, name: str) -> None:
        """Raises UnknownModel, ModelNotAllowed, DependencyUnavailable if Redis has never been read,
        and InvalidRequest for an empty name.
        """
        if not name:
            reason = "the request names no model, and this gateway has no default"
            raise InvalidRequest(f"model: {reason}", param="model")
        if not self.has(tenant.tenant_id, name):
            if not self._registry.is_read:
                raise DependencyUnavailable("the catalogue is not read yet", retry_after_s=1.0)
            raise _unknown(name)
        check_model(tenant, name)

    async def choose(self, name: str) -> ServedModel:
        """Samples a revision for a new request by weight from those that can be served now. Raises
        UnknownModel, and NoCapacity if none can.
        """
        if self._own is not None and name == self.default_name:
            return ServedModel(self._catalog.card(name), self._own)
        model = self._with_cards(self._model(name))
        while True:
            revision = choose_revision(model, self._draw() if len(model.revisions) > 1 else 0.0)
            assert revision is not None, "it has a card, so it has a digest"
            try:
                return await self._served(model, revision)
            except NoCapacity:
                others = tuple(each for each in model.revisions if each != revision)
                if not any(each.weight > 0 for each in others):
                    raise
                model = msgspec.structs.replace(model, revisions=others)

    async def main(self, name: str) -> ServedModel:
        """Returns the revision that most requests get. Raises as `choose` does."""
        if self._own is not None and name == self.default_name:
            return ServedModel(self._catalog.card(name), self._own)
        model = self._with_cards(self._model(name))
        return await self._served(model, _heaviest(model))

    def card(self, name: str) -> ModelCard:
        """Returns the card of the revision that `main` returns. Raises as `choose` does."""
        if name == self.default_name:
            return self._catalog.card(name)
        model = self._with_cards(self._model(name))
        return self._card(model, _heaviest(model))

    def weights_of(self, card: ModelCard) -> ServedWeights:
        """Returns the model, its revision in the catalogue and the digest of its weights."""
        model = self._registry.models.get(card.name)
        revisions = () if model is None else model.revisions
        named = (each.name for each in revisions if each.digest == card.revision)
        return ServedWeights(name=card.name, revision=next(named, ""), weights=card.revision)

    def cards(self, tenant: TenantRecord) -> list[ModelCard]:
        """Returns the cards of the models that the tenant may use and that can be served, the
        gateway's own first.
        """
        found = [*self._catalog.cards(), *self._registry_cards(tenant.tenant_id)]
        return [card for card in found if may_use(tenant, card.name)]

    def _registry_cards(self, tenant_id: str) -> Iterator[ModelCard]:
        for name in self._registry.models:
            if name != self.default_name and self.has(tenant_id, name):
                try:
                    yield self.card(name)
                except NoCapacity:
                    continue

    def _model(self, name: str) -> RegisteredModel:
        model = self._registry.models.get(name)
        if model is None:
            raise _unknown(name)
        return model

    def _with_cards(self, model: RegisteredModel) -> RegisteredModel:
        """Returns the model with the revisions that can be served now."""
        loaded = [each for each in model.revisions if each.digest and each.weight > 0]
        served = tuple(each for each in loaded if self._catalog.card_of(model.name, each.digest))
        if served:
            return msgspec.structs.replace(model, revisions=served)
        reason = f"no host has loaded the model {model.name!r} yet"
        if loaded:
            reason = f"no worker and no host has the model {model.name!r} now"
        names = {name for each in model.revisions if each.weight > 0 for name in _names(each)}
        if failure := self._catalog.failure_of(model.name, names):
            reason = f"the model {model.name!r} cannot be served: {failure}"
        raise NoCapacity(reason, retry_after_s=self._catalog.start_s(model.name))

    async def _served(self, model: RegisteredModel, revision: RegisteredRevision) -> ServedModel:
        text = await self._texts.get(TextSource(revision.source, revision.digest))
        return ServedModel(self._card(model, revision), text)

    def _card(self, model: RegisteredModel, revision: RegisteredRevision) -> ModelCard:
        card = self._catalog.card_of(model.name, revision.digest)
        if card is None:
            raise NoCapacity(f"the model {model.name!r} has just left", retry_after_s=1.0)
        most = model.max_context_tokens
        if most is None or most >= card.max_context_tokens:
            return card
        return msgspec.structs.replace(card, max_context_tokens=most)

    def _draw(self) -> float:
        """Returns a uniform random number in [0, 1)."""
        return (int.from_bytes(self._randomness.bytes(8), "little") >> 11) / (1 << 53)


def _heaviest(model: RegisteredModel) -> RegisteredRevision:
    """Returns the revision with the most weight, of several the first."""
    return max(model.revisions, key=lambda each: each.weight)


def _names(revision: RegisteredRevision) -> tuple[str, str]:
    """Returns the name and digest by which hosts report the revision."""
    return revision.name, revision.digest


def _unknown(name: str) -> UnknownModel:
    return UnknownModel(f"the model {name!r} does not exist", param="model")

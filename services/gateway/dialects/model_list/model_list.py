"""Lists the models that a tenant may use, with the fields of OpenAI's and Anthropic's lists."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from services.gateway.models.gateway_models import GatewayModels
from shared.messages import ModelCard
from shared.pixels.pixel_frames import IMAGES_FEATURE
from shared.tenancy.tenant import TenantRecord


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    """The name to send as `model`."""
    object: str = "model"
    created: int
    """When the gateway started, in seconds since 1970."""
    owned_by: str = "hearth"
    """Always `hearth`."""
    type: str = "model"
    """Always `model`."""
    display_name: str
    """The name again, for people."""
    lifecycle: str = "active"
    """Always `active`."""
    created_at: str
    """The same time in RFC 3339."""
    max_input_tokens: int
    """The context in tokens; Anthropic's name."""
    max_tokens: int
    """The context in tokens; Anthropic's name."""
    max_context: int
    """The context in tokens."""
    revision: str
    """The revision of the weights that most live decode workers serve."""
    input_modalities: list[str]
    """What messages may hold: `text`, and `image` if the model takes images."""


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All models that the tenant may use."""

    object: str = "list"
    data: list[ModelEntry]
    has_more: bool = False
    """Always false: there is no next page."""
    first_id: str | None
    """The name of the first model; null if there is none."""
    last_id: str | None
    """The name of the last model; null if there is none."""
    models: list[Any] | msgspec.UnsetType = msgspec.UNSET
    """Empty; for Codex alone."""


class TenantModels:
    """Lists models by their names and by the aliases that a tenant has. `created`: seconds since
    1970, equal for every model.
    """

    def __init__(self, models: GatewayModels, *, created: int) -> None:
        self._models = models.served
        self._names = models.names
        self._created = created
        self._created_at = f"{datetime.fromtimestamp(created, UTC):%Y-%m-%dT%H:%M:%SZ}"

    async def all(self, tenant: TenantRecord) -> ModelList:
        """Returns the list. Raises DependencyUnavailable if the tenant's aliases have never been
        read.
        """
        data = [
            self._entry(name, card)
            async for card, names in self._names.all(tenant)
            for name in names
        ]
        return ModelList(
            data=data,
            first_id=data[0].id if data else None,
            last_id=data[-1].id if data else None,
        )

    async def one(self, tenant: TenantRecord, name: str) -> ModelEntry:
        """Returns one entry. Raises UnknownModel for a model that this gateway does not serve,
        ModelNotAllowed, and NoCapacity before any worker serves the model.
        """
        model = await self._names.resolve(tenant.tenant_id, name)
        self._models.check(tenant, model)
        return self._entry(name, self._models.card(model))

    def _entry(self, name: str, card: ModelCard) -> ModelEntry:
        return ModelEntry(
            id=name,
            created=self._created,
            display_name=card.name,
            created_at=self._created_at,
            max_input_tokens=card.max_context_tokens,
            max_tokens=card.max_context_tokens,
            max_context=card.max_context_tokens,
            revision=card.revision,
            input_modalities=["text", *(["image"] if IMAGES_FEATURE in card.features else [])],
        )

"""What the commands need of the gateway; services do not import each other, so it is passed in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from services.local.api_keys import StoreApiKey
from shared.store import Store
from shared.tenant import ApiKeyRecord, TenantRecord, UsageRow


class Reading(Protocol):
    """What a tenant has used up now."""

    @property
    def used(self) -> Mapping[str, float]: ...
    @property
    def num_open(self) -> int: ...


class Office(Protocol):
    """See `services/gateway/tenancy/office.py`."""

    async def add(
        self, tenant_id: str, changes: Mapping[str, Any], api_key: str
    ) -> TenantRecord: ...

    async def all(self) -> Mapping[str, TenantRecord | None]: ...

    async def one(self, tenant_id: str) -> TenantRecord: ...

    async def change(self, tenant_id: str, changes: Mapping[str, Any]) -> TenantRecord: ...

    async def reading(self, tenant: TenantRecord) -> Reading: ...

    async def keys(self, tenant_id: str) -> Sequence[ApiKeyRecord]: ...

    async def add_key(self, tenant_id: str, api_key: str) -> str: ...

    async def rotate(
        self, tenant_id: str, api_key: str, *, keep_s: float, key_id: str | None
    ) -> Sequence[str]: ...

    async def revoke(self, tenant_id: str, key_id: str | None) -> Sequence[str]: ...

    async def usage(self, tenant_ids: Sequence[str], days: Sequence[str]) -> Sequence[UsageRow]: ...


# A store, and what gives unix seconds.
OpenOffice = Callable[[Store, Callable[[], float]], Office]


@dataclass(frozen=True, slots=True)
class GatewayParts:
    """Each is called where it is needed, so that `--help` is quick."""

    store_api_key: Callable[[], StoreApiKey]
    open_office: Callable[[], OpenOffice]

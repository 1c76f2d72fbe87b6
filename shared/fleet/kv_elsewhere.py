"""The messages between an operator who asks what other sites hold of a tenant, and a gateway."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from shared.messages import Message, Name, ProcessId, SiteTenantKv

MAX_SITES = 4096


class SiteKv(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a linked site holds. `problem` says why it is not known."""

    site: str
    region: str = ""
    kv: SiteTenantKv | None = None
    problem: str = ""


class ReadKvElsewhere(Message, frozen=True, kw_only=True):
    """What do the linked sites hold of a tenant of this site? The reply is KvElsewhere."""

    tenant_id: Name


class KvElsewhere(Message, frozen=True, kw_only=True):
    """All sites that the gateway has heard since its start, by name."""

    gateway_id: ProcessId
    sites: Annotated[tuple[SiteKv, ...], Meta(max_length=MAX_SITES)]

    @property
    def sender_id(self) -> str:
        return self.gateway_id

"""Stores a tenant's named prefixes in Redis, and reports them. The index pins them on workers."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

import structlog

from services.gateway.dialects.prefixes.bodies import (
    Prefix,
    PrefixEntry,
    PrefixList,
    PrefixRequest,
    WorkerPrefix,
    prompt_of,
)
from services.gateway.dialects.prefixes.errors import UnknownPrefix
from services.gateway.dialects.prefixes.prefix_tokenizer import PrefixTokenizer
from services.gateway.models.model_names import ModelNames
from services.gateway.models.served_models import ServedModels
from services.gateway.models.served_text import ServedModel
from services.gateway.tenancy.permissions import (
    Latest,
    OnRefused,
    check_may_store,
    ignore_refusal,
    late_refusal,
    may_store,
)
from shared.block_hash import PUBLIC_TENANT_ID
from shared.errors import HearthError, InvalidRequest
from shared.lifecycle.heartbeat import HealthMonitor
from shared.messages import MatchPrefix, ModelCard, PrefixMatches
from shared.packing import TOKEN_ID_BYTES, pack_hashes
from shared.store import Store
from shared.subjects import MATCH
from shared.tenancy.prefixes import pinned_prefix
from shared.tenancy.prefixes.pinned_prefix import (
    MAX_PER_TENANT,
    NAME_PATTERN,
    PinnedPrefix,
    TooManyPrefixes,
)
from shared.tenancy.prefixes.public_prefixes import PublicPrefixes
from shared.tenancy.tenant import TenantRecord

log = structlog.get_logger(__name__)

MATCH_TIMEOUT_S = 0.25  # and the round trip


class PrefixStore:
    def __init__(
        self,
        store: Store,
        *,
        health_monitor: HealthMonitor,
        models: ServedModels,
        names: ModelNames,
        reader_of: Callable[[ServedModel], PrefixTokenizer],
        wall_clock: Callable[[], float],
        max_all_bytes: Callable[[], int],
        region: str = "",
        region_classes: Sequence[str] = (),
        public: PublicPrefixes,
        on_refused: OnRefused = ignore_refusal,
        latest: Latest = lambda tenant: tenant,
    ) -> None:
        """`max_all_bytes`: returns the bytes that the prefixes of all tenants may take in Redis.
        `region`: this gateway's region, in `region_classes`. `wall_clock`: returns unix seconds,
        which stay valid across restarts. `latest`: of a tenant of another site.
        """
        self._latest = latest
        self._public = public
        self._region = region
        self._classes = region_classes
        self._on_refused = on_refused
        self._max_all_bytes = max_all_bytes
        self._requests = health_monitor.requests
        self._store = store
        self._fleet = health_monitor.fleet
        self._models = models
        self._names = names
        self._reader_of = reader_of
        self._wall_clock = wall_clock

    # ── prefixes of a tenant ─────────────────────────────────────────────────────────────────────

    async def put(
        self,
        tenant: TenantRecord,
        name: str,
        body: PrefixRequest,
        *,
        charge: Callable[[int], Awaitable[None]],
    ) -> Prefix:
        """`charge`: called with the prefix's tokens before the prefix is stored.

        Raises InvalidRequest and its subclasses, TooManyPrefixes, PrefixStorageFull,
        AllPrefixesFull, PermissionDenied and its subclasses, StoreUnavailable, and the errors of
        `charge`.
        """
        check_may_store(tenant, self._region, "a prefix", on_refused=self._on_refused)
        if not re.match(NAME_PATTERN, name):
            raise InvalidRequest(
                "a prefix's name has 1 to 64 letters, digits, dots, dashes and underscores, and "
                "starts with a letter or digit",
                param="name",
            )
        model = await self._names.main(tenant, body.model or None)
        card = model.card
        await self._check_room(tenant.tenant_id, name)
        now = int(self._wall_clock())
        prompt = prompt_of(body)
        prefix = PinnedPrefix(
            name=name,
            tenant_id=tenant.tenant_id,
            model=card.name,
            messages=[dict(each) for each in prompt.messages],
            tools=[dict(each) for each in prompt.tools],
            cache_salt=body.cache_salt or "",
            created_at=now,
            expires_at=None if body.ttl_s is None else now + body.ttl_s,
        )
        reader = self._reader_of(model)
        prefix = await reader.read(
            prefix, card, images=prompt.images, max_input_tokens=tenant.input_tokens_per_min
        )
        await charge(len(prefix.token_ids) // TOKEN_ID_BYTES)
        latest = self._latest(tenant)
        is_allowed = latest is not None and may_store(latest, self._region)
        if not is_allowed or not await pinned_prefix.save(
            self._store,
            prefix,
            now,
            max_all_bytes=self._max_all_bytes(),
            owner=tenant,
            region=self._region,
            region_classes=self._classes,
        ):
            raise late_refusal(tenant.tenant_id, "a prefix", self._on_refused)
        return await self._stored(tenant, prefix, card)

    async def get(self, tenant: TenantRecord, name: str) -> Prefix:
        """Returns the tenant's prefix, else a public one. Raises UnknownPrefix and
        StoreUnavailable.
        """
        for tenant_id in self._readable(tenant):
            prefix = await pinned_prefix.load(self._store, tenant_id, name)
            if prefix is not None and not self._models.hides(tenant.tenant_id, prefix.model):
                return await self._stored(tenant, prefix, self._models.card(prefix.model))
        raise UnknownPrefix(f"there is no prefix {name!r}", param="name")

    async def delete(self, tenant: TenantRecord, name: str) -> None:
        """Raises UnknownPrefix, StoreUnavailable."""
        if name not in await pinned_prefix.entries(self._store, tenant.tenant_id):
            raise UnknownPrefix(f"there is no prefix {name!r} of this tenant", param="name")
        await pinned_prefix.delete(self._store, tenant.tenant_id, name)

    async def list(self, tenant: TenantRecord) -> PrefixList:
        """Raises StoreUnavailable."""
        data = []
        for tenant_id in self._readable(tenant):
            entries = await pinned_prefix.entries(self._store, tenant_id)
            data += [
                PrefixEntry(
                    name=name,
                    model=entry.model,
                    is_public=tenant_id == PUBLIC_TENANT_ID,
                    num_tokens=entry.num_tokens,
                    expires_at=entry.expires_at,
                )
                for name, entry in entries.items()
                if not entry.is_over(self._wall_clock())
                and not self._models.hides(tenant.tenant_id, entry.model)
            ]
        return PrefixList(data=data)

    def _readable(self, tenant: TenantRecord) -> Sequence[str]:
        """Returns the owners of the prefixes that this gateway may read for the tenant, by the
        tenant's current record.
        """
        is_allowed = may_store(tenant, self._region)
        return (tenant.tenant_id, PUBLIC_TENANT_ID) if is_allowed else (PUBLIC_TENANT_ID,)

    async def held(
        self,
        tenant_id: str,
        card: ModelCard,
        block_hashes: bytes,
        *,
        region_class: str = "",
        regions: Collection[str] | None = None,
        num_public_blocks: int = 0,
    ) -> PrefixMatches | None:
        """Returns the cached blocks per worker, without counting a use. None: index unavailable, or
        not in `regions`. These and `region_class` are those of the tenant; none of a public prefix.
        """
        live = self._fleet.live("kv_index")
        if regions is not None and not region_class and any(e.region not in regions for e in live):
            return None
        if not block_hashes:
            return PrefixMatches(state="exact", matches=())
        question = MatchPrefix(
            tenant_id=tenant_id,
            model=card.name,
            revision=card.revision,
            block_hashes=block_hashes,
            is_counted=False,
            region_class=region_class,
            num_public_blocks=num_public_blocks if region_class else 0,
        )
        try:
            return await self._requests.request(
                MATCH, MATCH, question, PrefixMatches, base_s=MATCH_TIMEOUT_S
            )
        except HearthError as error:
            log.debug("prefix_index_unavailable", reason=error.code)
            return None

    async def _check_room(self, tenant_id: str, name: str) -> None:
        """Rejects a prefix before it is rendered and tokenized. `save` decides afterwards."""
        others = set(await pinned_prefix.entries(self._store, tenant_id)) - {name}
        if len(others) >= MAX_PER_TENANT:
            raise TooManyPrefixes(f"a tenant can have {MAX_PER_TENANT} prefixes: delete one first")

    async def _stored(self, tenant: TenantRecord, prefix: PinnedPrefix, card: ModelCard) -> Prefix:
        chain = self._public.chain_of_prefix(prefix, card)
        hashes = chain.hashes
        found = await self.held(
            prefix.tenant_id,
            card,
            pack_hashes(hashes),
            region_class="" if prefix.is_public else tenant.region_class,
            regions=None if prefix.is_public else tenant.allowed_regions,
            num_public_blocks=chain.num_public,
        )
        counts = await self._counts(prefix.tenant_id, hashes)
        matches = () if found is None else found.matches
        workers = [
            WorkerPrefix(worker=each.worker_id, cached_tokens=each.num_blocks * card.block_size)
            for each in sorted(matches, key=lambda each: each.worker_id)
        ]
        warm = {each.worker_id for each in matches if each.num_blocks >= len(hashes)}
        regions = None if prefix.is_public else tenant.allowed_regions
        is_warm = bool(warm) and warm >= self._workers_of(prefix.model, card.revision, regions)
        reason = await pinned_prefix.reason_of(self._store, prefix.tenant_id, prefix.name)
        if not prefix.is_of(card.revision):
            reason = "its images were read for other weights of the model: put the prefix again"
        last_use = counts.get(b"last_use")
        return Prefix(
            name=prefix.name,
            model=prefix.model,
            is_public=prefix.is_public,
            num_tokens=len(prefix.token_ids) // TOKEN_ID_BYTES,
            pinned_tokens=len(hashes) * card.block_size,
            state="unknown" if found is None else "warm" if is_warm else "warming",
            reason=None if is_warm else reason,
            workers=workers,
            hits=_number(counts, b"hits"),
            saved_tokens=_number(counts, b"saved_tokens"),
            bytes=_number(counts, b"bytes"),
            last_used_at=None if last_use is None else _number(counts, b"last_use"),
            created_at=prefix.created_at,
            expires_at=prefix.expires_at,
            messages=prefix.messages,
            tools=prefix.tools,
        )

    async def _counts(self, tenant_id: str, hashes: Sequence[bytes]) -> Mapping[bytes, bytes]:
        if not hashes:
            return {}
        return await self._store.hash_get(pinned_prefix.record_key(tenant_id, hashes[-1]))

    def _workers_of(self, model: str, revision: str, regions: Collection[str] | None) -> set[str]:
        return {
            each.process_id
            for role in ("prefill", "decode")
            for each in self._fleet.live(role)
            if each.model is not None
            and (each.model.name, each.model.revision) == (model, revision)
            if regions is None or each.region in regions
        }


def _number(counts: Mapping[bytes, bytes], name: bytes) -> int:
    text = counts.get(name, b"0")
    return int(text) if text.isdigit() else 0

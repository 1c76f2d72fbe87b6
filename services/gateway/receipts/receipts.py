"""The receipts of one gateway: drawn up with each response, signed when their tenant reads them."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from services.gateway.receipts.draft import ReceiptDraft
from services.gateway.receipts.options import ReceiptOptions
from services.gateway.receipts.places import Places
from services.gateway.receipts.receipt_store import ReceiptStore
from services.gateway.streams.changed_regions import ChangedRegions
from shared.background import failing_alone
from shared.clock import Clock
from shared.config import GatewayConfig
from shared.lifecycle.release import installed_release
from shared.randomness import Randomness
from shared.receipts.jws import PublicJwk, jwk_of, signed_jws
from shared.receipts.receipt import IssuedReceipt, ServedWeights, payload_hash
from shared.receipts.salted import SALT_BYTES, ReceiptSalt
from shared.secrets.secret import Derived, Secret
from shared.tenancy.tenant import TenantRecord
from shared.tenancy.tenant_copy import SigningKey

ZERO_RETENTION_S = 600.0
SWEEP_S = 10.0
STALE_S = 2.0  # a request may begin with a record that was changed before
MAX_REMOVED = 10_000  # tenants


class Receipts:
    """`wall_clock`: seconds since 1970. Without a cluster secret there is no key and no receipt."""

    def __init__(
        self,
        config: GatewayConfig,
        places: Places,
        clock: Clock,
        wall_clock: Callable[[], float],
        randomness: Randomness,
    ) -> None:
        ttl_s = config.receipt_ttl_s
        secret = config.secret("cluster_secret") if ttl_s else Secret("")
        self._keys = Derived(secret, SigningKey.of_secret)
        self._places = places
        self._clock = clock
        self._wall_clock = wall_clock
        self._randomness = randomness
        self._standard = ReceiptStore(ttl_s, config.max_receipt_bytes)
        zero_s = min(ttl_s, ZERO_RETENTION_S)
        self._zero = ReceiptStore(zero_s, config.max_receipt_bytes // 4, is_read_once=True)
        self._removed_at: dict[str, float] = {}  # by tenant, the last removal

    @property
    def public_keys(self) -> tuple[PublicJwk, ...]:
        """Returns the key that signs, and others that have signed before or will next."""
        site = self._places.own.site
        return tuple(jwk_of(each.public, site) for each in self._keys.accepted)

    def draft(
        self, tenant: TenantRecord, endpoint: str, options: ReceiptOptions
    ) -> ReceiptDraft | None:
        """Returns None for a response without a receipt."""
        if tenant.is_zero_retention:
            self._standard.remove_tenant(tenant.tenant_id)  # those before it was switched on
        default = not tenant.is_zero_retention
        is_wanted = default if options.is_wanted is None else options.is_wanted
        if self._keys.current is None or not is_wanted:
            return None
        replayed = options.replayed
        salt = self._randomness.bytes(SALT_BYTES) if replayed is None else replayed.salt
        return ReceiptDraft(tenant, endpoint, ReceiptSalt(salt), self._places)

    def store(
        self, draft: ReceiptDraft, request_id: str, model: ServedWeights, received_at: float
    ) -> None:
        """Stores the receipt of a response whose outputs have ended, and sets the draft's hash. Of
        a request from before the removal of its tenant's receipts it stores none.
        """
        if self._is_removed(draft.tenant, received_at):
            return
        now = self._clock.now()
        offset_s = self._wall_clock() - now
        receipt = draft.receipt(
            request_id,
            model,
            release=installed_release(),
            received_at=received_at,
            finished_at=now,
            unix_time=lambda at: round(at + offset_s, 3),
        )
        if receipt is None:
            return
        payload, tenant = receipt.payload, draft.tenant
        draft.hash = payload_hash(payload)
        store = self._zero if tenant.is_zero_retention else self._standard
        store.add(tenant.tenant_id, request_id, payload, draft.salt.salt, now)

    def read(self, tenant: TenantRecord, request_id: str) -> IssuedReceipt | None:
        """Signs a receipt. Returns None for one that is not here, or is of another tenant."""
        now = self._clock.now()
        if tenant.is_zero_retention:  # since it was switched on
            self._standard.remove_tenant(tenant.tenant_id)
        stores = (self._standard, self._zero)
        reads = (each.read(tenant.tenant_id, request_id, now) for each in stores)
        found = next((each for each in reads if each is not None), None)
        key = self._keys.current
        if found is None or key is None:
            return None
        return IssuedReceipt(
            request_id=request_id,
            receipt=signed_jws(found.payload, key.public, key.sign_jws),
            hash=payload_hash(found.payload),
            salt=ReceiptSalt(found.salt).text,
        )

    def change_regions(self, changed: ChangedRegions) -> None:
        """Removes the receipts of a tenant whose data may no longer be here."""
        if changed.error is not None:
            self.remove_tenant(changed.tenant_id)

    def remove_tenant(self, tenant_id: str) -> int:
        """Removes all receipts of a tenant, also those of its running requests. Returns how many
        there were.
        """
        self._removed_at.pop(tenant_id, None)
        self._removed_at[tenant_id] = self._clock.now()
        for each in list(self._removed_at)[:-MAX_REMOVED]:
            del self._removed_at[each]
        return sum(each.remove_tenant(tenant_id) for each in (self._standard, self._zero))

    def _is_removed(self, tenant: TenantRecord, received_at: float) -> bool:
        removed_at = self._removed_at.get(tenant.tenant_id, -inf)
        return received_at < removed_at + (0.0 if tenant.is_zero_retention else STALE_S)

    async def run(self) -> None:
        """Removes receipts when their time has come, also without any request."""
        while True:
            await self._clock.sleep(SWEEP_S)
            for each in (self._standard, self._zero):
                with failing_alone("receipts_not_expired"):
                    each.expire(self._clock.now())

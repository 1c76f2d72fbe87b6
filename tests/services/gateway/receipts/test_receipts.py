"""Which receipts a gateway holds of whom."""

from __future__ import annotations

from typing import Any

from services.gateway.receipts.options import NO_OPTIONS, ReceiptOptions
from services.gateway.receipts.places import Places
from services.gateway.receipts.receipts import STALE_S, ZERO_RETENTION_S, Receipts
from services.gateway.streams.changed_regions import ChangedRegions
from shared.config import GatewayConfig
from shared.errors import NoCapacity
from shared.randomness import SystemRandomness
from shared.receipts.receipt import ServedWeights
from shared.tenancy.tenant import TenantRecord
from tests.services.gateway.receipts.test_draft import ChoiceEnd, Drawn, Ended, attempt, end_of
from tests.services.gateway.tenancy.test_api_keys import ManualClock

OPEN, ZERO = TenantRecord(tenant_id="t"), TenantRecord(tenant_id="t", is_zero_retention=True)
WEIGHTS = ServedWeights(name="tiny", weights="digest")
ON, OFF = ReceiptOptions(True), ReceiptOptions(False)


class Held:
    def __init__(self, **fields: Any) -> None:
        options = {"cluster_secret": "secret", "receipt_ttl_s": 3600.0, **fields}
        config = GatewayConfig(
            nats_url="nats://g:p@h", process_id="g", redis_url="redis://h", **options
        )
        self.clock = ManualClock()
        places = Places("g", "", "", lambda site: "")
        self.receipts = Receipts(config, places, self.clock, lambda: 0.0, SystemRandomness())

    def is_drawn(self, tenant: TenantRecord, options: ReceiptOptions = NO_OPTIONS) -> bool:
        return self.receipts.draft(tenant, "chat", options) is not None

    def store(self, tenant: TenantRecord, request_id: str, received_at: float | None = None) -> str:
        draft = self.receipts.draft(tenant, "chat", ON)
        assert draft is not None
        end = end_of(attempt("decode-1", num_tokens=1), outputs=([4],))
        Drawn(draft).ended(0, Ended(end, [ChoiceEnd(1, "stop")]))
        received_at = self.clock.time if received_at is None else received_at
        self.receipts.store(draft, request_id, WEIGHTS, received_at)
        return draft.hash

    def has(self, tenant: TenantRecord, request_id: str) -> bool:
        return self.receipts.read(tenant, request_id) is not None


def test_tenants_have_receipts_unless_they_keep_nothing() -> None:
    held = Held()
    assert held.is_drawn(OPEN)
    assert not held.is_drawn(OPEN, OFF)
    assert not held.is_drawn(ZERO)
    assert held.is_drawn(ZERO, ON)
    for without in ({"cluster_secret": ""}, {"receipt_ttl_s": 0.0}):
        assert not Held(**without).is_drawn(OPEN, ON)


def test_keys_of_all_accepted_secrets_are_shown() -> None:
    old, both = Held().receipts.public_keys, Held(cluster_secret="new\nsecret").receipts.public_keys
    assert both == (*Held(cluster_secret="new").receipts.public_keys, *old)
    assert len(both) == 2


def test_receipts_end() -> None:
    held = Held()
    assert len(held.store(OPEN, "open")) == 43
    held.store(TenantRecord(tenant_id="z", is_zero_retention=True), "zero")
    held.clock.time += ZERO_RETENTION_S
    assert not held.has(TenantRecord(tenant_id="z", is_zero_retention=True), "zero")
    assert held.has(OPEN, "open")
    held.clock.time += 3600 - ZERO_RETENTION_S
    assert not held.has(OPEN, "open")


def test_switch_to_zero_retention_removes_what_is_there() -> None:
    held = Held()
    held.store(OPEN, "read")
    assert not held.has(ZERO, "read")
    held.store(OPEN, "asked")
    held.is_drawn(ZERO)
    assert not held.has(OPEN, "asked")


def test_running_requests_leave_no_receipt_once_their_tenant_may_have_none() -> None:
    """Zero retention was switched on, or the tenant was removed, since they began."""
    held = Held()
    began_at = held.clock.time
    held.clock.time += 60
    held.receipts.remove_tenant("t")
    held.clock.time += 60
    held.store(OPEN, "running", received_at=began_at)
    held.store(OPEN, "stale", received_at=began_at + 60 + STALE_S / 2)
    held.store(ZERO, "zero", received_at=began_at)
    assert len(held.receipts._standard) == len(held.receipts._zero) == 0
    held.store(OPEN, "new", received_at=began_at + 60 + STALE_S)
    assert held.has(OPEN, "new")
    held.store(ZERO, "asked", received_at=began_at + 60)
    assert held.has(ZERO, "asked")


def test_tenant_that_leaves_the_region_has_no_receipts_there() -> None:
    held = Held()
    held.store(OPEN, "r")
    held.receipts.change_regions(ChangedRegions("t", ("fr",)))
    assert held.has(OPEN, "r"), "this gateway may still have it"
    held.receipts.change_regions(ChangedRegions("t", ("fr",), error=NoCapacity("left")))
    assert not held.has(OPEN, "r")

"""A gateway finds the receipts that another one of its site holds, for their tenant alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import pytest

from services.gateway.dialects.receipts.issued import KEY_BYTES, TenantReceipts
from services.gateway.receipts.site_receipts import TIMEOUT_S, Found, SiteReceipts
from shared.background import start_awaited
from shared.errors import ConfigError
from shared.receipts.read_receipt import ReadReceipt, ReceiptRead
from shared.regions.region_classes import region_classes
from shared.subjects import receipt
from shared.tenancy.tenant import TenantRecord
from shared.tenancy.tenant_copy import SITE_KEYS
from tests.services.gateway.receipts.test_receipts import Held
from tests.support.world.bus import SimulatedNetwork
from tests.support.world.clock import run
from tests.support.world.gateway import StreamGateway
from tests.support.world.store import MemoryStore

CLASSES = region_classes(["eu=fr,de"])
FREE, BOUND = TenantRecord(tenant_id="free"), TenantRecord(tenant_id="bound", region_class="eu")
ZERO = TenantRecord(tenant_id="zero", is_zero_retention=True)


class Site:
    """Gateways of one site, by region; `records` are the tenants that Redis knows."""

    def __init__(self, *regions: str) -> None:
        self.network = SimulatedNetwork()
        self.records = {each.tenant_id: each for each in (FREE, BOUND, ZERO)}
        self.held = [Held() for _ in regions]
        self.gateways = [
            StreamGateway(
                self.network, f"gateway-{number}", seed=number, region=region, classes=CLASSES
            )
            for number, region in enumerate(regions)
        ]
        self.at_site = [
            SiteReceipts(
                held.receipts,
                {"response": "r"}.get,
                self._record_of,  # type: ignore[arg-type]
                gateway.bus,
                gateway.health_monitor,
            )
            for held, gateway in zip(self.held, self.gateways, strict=True)
        ]

    async def _record_of(self, tenant_id: str) -> TenantRecord | None:
        return self.records.get(tenant_id)

    async def start(self) -> None:
        for at_site, gateway in zip(self.at_site, self.gateways, strict=True):
            await at_site.serve()
            await gateway.start()
        await asyncio.sleep(1.0)

    async def find(self, number: int, tenant: TenantRecord, name: str = "r") -> Found:
        return await self.at_site[number].find(tenant, name)


def scenario(test: Callable[[Site], Awaitable[None]], *regions: str) -> None:
    async def main() -> None:
        site = Site(*regions)
        await site.start()
        await test(site)
        for each in site.gateways:
            if not each.process.is_frozen:
                await each.stop()

    run(main())


def test_any_gateway_reads_it_for_its_tenant_alone() -> None:
    async def test(site: Site) -> None:
        site.held[2].store(FREE, "r")
        for number in range(3):
            for name in ("r", "response"):
                found = (await site.find(number, FREE, name)).receipt
                assert found is not None and found.request_id == "r"
        assert await site.find(0, BOUND) == (None, 0)
        assert await site.find(0, FREE, "unknown") == (None, 0)
        assert await site.find(0, FREE, "r" * 1000) == (None, 0)

    scenario(test, "", "", "")


def test_the_holder_asks_its_own_record() -> None:
    """The one that asks may know an older one: of before the tenant left, or kept nothing."""

    async def test(site: Site) -> None:
        site.held[1].store(FREE, "r")
        site.records["free"] = TenantRecord(tenant_id="free", is_zero_retention=True)
        assert await site.find(0, FREE) == (None, 0)
        site.records["free"] = FREE
        assert await site.find(0, FREE) == (None, 0), "zero retention has removed it"
        site.held[1].store(FREE, "r")
        del site.records["free"]
        assert await site.find(0, FREE) == (None, 0)
        site.records["free"] = FREE
        assert (await site.find(0, FREE)).receipt is not None

    scenario(test, "", "")


def test_a_receipt_of_zero_retention_is_read_once_over_all_gateways() -> None:
    async def test(site: Site) -> None:
        site.held[1].store(ZERO, "r")
        assert (await site.find(0, ZERO)).receipt is not None
        for number in range(2):
            assert await site.find(number, ZERO) == (None, 0)

    scenario(test, "", "")


@pytest.mark.parametrize(("asking", "is_found"), [("de", True), ("us", False), ("", False)])
def test_it_goes_to_no_region_that_the_tenant_forbids(asking: str, is_found: bool) -> None:
    async def test(site: Site) -> None:
        site.held[1].store(BOUND, "r")
        assert ((await site.find(0, BOUND)).receipt is not None) is is_found

    scenario(test, asking, "fr")


def test_a_process_that_is_no_gateway_here_gets_none() -> None:
    async def test(site: Site) -> None:
        site.held[0].store(FREE, "r")
        bus = site.network.bus("gateway-9")
        question = ReadReceipt(gateway_id="gateway-9", tenant_id="free", request_id="r")
        reply = await bus.request(receipt("gateway-0"), question, ReceiptRead, timeout_s=1.0)
        assert reply == ReceiptRead()

    scenario(test, "")


def test_gateways_that_do_not_answer_are_waited_for_no_longer_than_the_limit() -> None:
    async def test(site: Site) -> None:
        async def fails(tenant_id: str) -> TenantRecord | None:
            raise ConfigError("the record is unreadable")

        site.at_site[1]._record_of = fails
        site.network.freeze("gateway-2")
        began = asyncio.get_running_loop().time()
        assert await site.find(0, FREE) == (None, 2)
        assert asyncio.get_running_loop().time() - began <= TIMEOUT_S + 0.1
        site.held[0].store(FREE, "r")
        assert (await site.find(0, FREE)).receipt is not None

    scenario(test, "", "", "")


def test_searches_of_one_tenant_delay_no_other() -> None:
    async def test(site: Site) -> None:
        site.network.freeze("gateway-1")  # each search waits for it
        site.held[2].store(BOUND, "r")
        flood = [start_awaited(site.find(0, FREE, f"unknown-{each}")) for each in range(100)]
        await asyncio.sleep(0)
        began = asyncio.get_running_loop().time()
        assert (await site.find(0, BOUND)).receipt is not None
        assert asyncio.get_running_loop().time() - began < TIMEOUT_S
        for each in flood:
            each.cancel()

    scenario(test, "fr", "fr", "fr")


class GatedStore(MemoryStore):
    """Redis that answers late."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = asyncio.Event()
        self.num_reads = 0

    async def hash_get(self, key: str) -> Mapping[bytes, bytes]:
        self.num_reads += 1
        await self.answers.wait()
        return await super().hash_get(key)


def test_every_caller_gets_the_keys_of_linked_sites() -> None:
    async def test(site: Site) -> None:
        store = GatedStore()
        await store.write([("HSET", SITE_KEYS, "b", bytes(KEY_BYTES))])
        held, at_site = site.held[0], site.at_site[0]
        receipts = TenantReceipts(held.receipts, at_site, store, held.clock)
        found = [start_awaited(receipts.keys()) for _ in range(2)]
        await asyncio.sleep(0.1)
        store.answers.set()
        for each in found:
            assert [key.site for key in (await each).keys][1:] == ["b"]
        assert store.num_reads == 1

    scenario(test, "")

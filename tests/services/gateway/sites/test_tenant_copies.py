"""A site deletes what it holds of a tenant before it forgets that it has to."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from services.gateway.sites.home_accounts import HomeAccounts
from services.gateway.sites.home_tenants import HomeTenants
from services.gateway.sites.linked_homes import LinkedHomes
from services.gateway.sites.tenant_copies import TenantCopyReader
from shared.messages import ReadTenantCopies, SiteState
from shared.secrets.secret import Secret
from shared.store import Command
from shared.subjects import STATES_OF_SITES, from_sites, state_to_sites
from shared.tenancy.copied_tenants import CopiedTenants
from shared.tenancy.deletion import kv_drops
from shared.tenancy.deletion.tenant_removal import TenantRemoval, TenantWithdrawal
from shared.tenancy.prefixes import pinned_prefix
from shared.tenancy.prefixes.pinned_prefix import PinnedPrefix
from shared.tenancy.tenant import TENANT_COPIES
from shared.tenancy.tenant_admin import TenantAdmin
from shared.tenancy.tenant_copy import SITES
from tests.support.world.bus import SimulatedNetwork
from tests.support.world.clock import VirtualClock, run
from tests.support.world.links import LinkedNetworks
from tests.support.world.store import MemoryStore

SOON_S = 5.0


class DyingStore(MemoryStore):
    """Whoever uses it dies after the next change of copies, if it `is_doomed`."""

    is_doomed = False

    async def write(self, commands: Sequence[Command]) -> None:
        await super().write(commands)
        self.is_away |= self.is_doomed and any(TENANT_COPIES in each for each in commands)


class Rig:
    """Site a, the home of `acme`, and a gateway of site b, without orders over the link."""

    def __init__(self) -> None:
        self.networks = {name: SimulatedNetwork() for name in "ab"}
        LinkedNetworks(self.networks, {"a": "", "b": ""}, delay_s=0.02, pairs=[("a", "b")])
        self.home_store, self.store = MemoryStore(), DyingStore()
        self.admin = TenantAdmin(self.home_store, self.home_store.now)
        self.removal = TenantRemoval(self.home_store, self.home_store.now)

    async def start(self) -> None:
        await self.home_store.write([("HSET", SITES, "b", "")])
        await self.admin.add("acme", {"sites": ("b",)}, "key")
        self._bus = self.networks["a"].bus("gateway-a")
        accounts = HomeAccounts(self.home_store, self.home_store.now, gateway_id="a/gateway-a")
        home = HomeTenants(
            self.home_store,
            VirtualClock(),
            accounts,
            site="a",
            gateway_id="a/gateway-a",
            cluster_secret=Secret("secret"),
            region_of=lambda site: "",
        )
        subject = from_sites("gateway", "gateway-a", "tenants")
        await self._bus.serve(subject, ReadTenantCopies, home.answer)
        self._states = asyncio.create_task(self._send_states())
        await self.start_reader("gateway-b")

    async def _send_states(self) -> None:
        for number in range(1_000_000):
            state = SiteState(gateway_id="a/gateway-a", epoch=1, sequence_number=number)
            await self._bus.publish(state_to_sites("gateway-a"), state)
            await asyncio.sleep(1.0)

    async def start_reader(self, name: str) -> None:
        bus, clock = self.networks["b"].bus(name), VirtualClock()
        homes = LinkedHomes(bus, clock, lambda site: None)
        await bus.subscribe(STATES_OF_SITES, SiteState, homes.observe)
        self.copied = CopiedTenants("b")
        withdrawal = TenantWithdrawal(self.store, self.store.now)
        self.reader = TenantCopyReader(
            homes, clock, self.store, self.copied, withdrawal, gateway_id=f"b/{name}"
        )
        await self.reader.start()
        await asyncio.sleep(SOON_S)

    async def save_prefix(self) -> None:
        prefix = PinnedPrefix(
            name="rules", tenant_id="a/acme", model="m", messages=[], created_at=1
        )
        await pinned_prefix.save(self.store, prefix, 0.0)

    async def ordered(self) -> list[str]:
        return [each.drop.reason for each in await kv_drops.orders(self.store)]

    async def stop(self) -> None:
        self._states.cancel()
        await self.reader.stop()


def test_gateway_that_dies_over_a_removal_leaves_it_to_the_next_one() -> None:
    async def test() -> None:
        rig = Rig()
        await rig.start()
        assert rig.copied.named("a/acme") is not None and rig.store.data[TENANT_COPIES]
        await rig.save_prefix()
        rig.store.is_doomed = True
        await rig.removal.remove("acme", with_usage=False)
        await asyncio.sleep(SOON_S)
        await rig.reader.stop()
        rig.store.is_away = rig.store.is_doomed = False
        await rig.start_reader("gateway-c")
        assert await rig.ordered() == ["removed"]
        assert await pinned_prefix.entries(rig.store, "a/acme") == {}
        assert not rig.store.data[TENANT_COPIES]
        await rig.stop()

    run(test())


def test_later_tenant_of_a_name_finds_nothing_of_the_one_before() -> None:
    """Both changes come with one reply: the site was away meanwhile."""

    async def test() -> None:
        rig = Rig()
        await rig.start()
        await rig.save_prefix()
        await rig.reader.stop()
        drop = await rig.removal.remove("acme", with_usage=False)
        await kv_drops.report(
            rig.home_store, drop.number, kv_drops.DropProgress(finished_at=rig.home_store.now())
        )
        await asyncio.sleep(11.0)
        await rig.admin.add("acme", {"sites": ("b",)}, "another key")
        await rig.start_reader("gateway-c")
        assert rig.copied.named("a/acme") is not None
        assert await rig.ordered() == ["removed"]
        assert await pinned_prefix.entries(rig.store, "a/acme") == {}
        await rig.stop()

    run(test())

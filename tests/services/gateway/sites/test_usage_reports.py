"""Usage of other sites' tenants goes to their homes, whoever is busy."""

from __future__ import annotations

from typing import TypeVar

from services.gateway.sites.linked_homes import LinkedHomes
from services.gateway.sites.usage_reports import MAX_PER_ROUND, UsageReporter
from shared.clock import MonotonicClock
from shared.errors import DependencyUnavailable
from shared.messages import Done, Message, ReportUsage
from shared.store import RedisStore
from shared.subjects import at_site
from shared.tenancy.site_usage import USAGE_UNSENT
from shared.tenancy.tenant import usage_of
from tests.support.servers import RedisServer
from tests.support.waiting import LIMIT_S
from tests.support.world.bus import SimulatedNetwork

M = TypeVar("M", bound=Message)
NUM_BUSY = 60
DAY = "2026-11-30"


class Homes(LinkedHomes):
    """Home sites that take every report; `away` do not answer. Meanwhile gateways count on."""

    def __init__(self, store: RedisStore) -> None:
        super().__init__(SimulatedNetwork().bus("gw"), MonotonicClock(), lambda site: None)
        self.store = store
        self.reported: list[str] = []
        self.away: set[str] = set()

    def is_heard(self, site: str) -> bool:
        return True

    async def request(
        self, site: str, message: Message, reply_type: type[M], *, timeout_s: float
    ) -> M:
        assert isinstance(message, ReportUsage)
        if site in self.away:
            raise DependencyUnavailable("the link is cut")
        self.reported.append(at_site(site, message.tenant_id))
        await use(self.store, self.reported[-1])
        return reply_type() if reply_type is Done else reply_type(gateway_id=site)


async def use(store: RedisStore, *names: str) -> None:
    keys = [usage_of(each, DAY) for each in names]
    places = [*((each, "requests:m") for each in keys), *((USAGE_UNSENT, each) for each in keys)]
    await store.write([("HINCRBY", *each, 1) for each in places])


async def test_busy_tenants_delay_no_other(redis_server: RedisServer) -> None:
    store = RedisStore(redis_server.scratch_url, MonotonicClock(), timeout_s=LIMIT_S)
    await store.write([("FLUSHDB",)])
    homes = Homes(store)
    reporter = UsageReporter(homes, MonotonicClock(), store, gateway_id="x/gw")
    names = [*(f"a/tenant-{number}" for number in range(NUM_BUSY)), "c/tenant"]
    await use(store, *names)

    async def round_of_use() -> list[str]:
        homes.reported.clear()
        await reporter.report()
        return list(homes.reported)

    rounds = [await round_of_use() for _ in range(NUM_BUSY // MAX_PER_ROUND + 1)]
    assert {each for found in rounds for each in found} == set(names)
    assert all("c/tenant" in found for found in rounds), "nor does a site with many tenants"
    homes.away = {"a"}
    assert await round_of_use() == ["c/tenant"]
    await store.close()

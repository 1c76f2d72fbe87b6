"""The linked sites as homes of tenants, and requests to one gateway of each."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TypeVar

from shared.clock import Clock
from shared.errors import ConfigError, DependencyUnavailable, InvalidRequest
from shared.messages import Message, SiteState
from shared.subjects import SITE_SEPARATOR, at_site, tenants
from shared.tenancy.tenant import check_tenant_id
from shared.transport.bus import Bus

MAX_GATEWAYS = 16  # of a site, remembered to be asked
SILENT_S = 3.0  # then another gateway of the site is asked

M = TypeVar("M", bound=Message)


def site_of(name: str) -> str:
    """Returns the site of `{site}/{gateway}` or `{site}/{tenant}`."""
    return name.partition(SITE_SEPARATOR)[0]


def tenant_of(gateway_id: str, tenant_id: str) -> str:
    """Returns what a tenant of the site of `gateway_id`, which may send any name, is called here.
    Raises InvalidRequest for a name that no tenant has.
    """
    try:
        return at_site(site_of(gateway_id), check_tenant_id(tenant_id))
    except ConfigError as error:
        raise InvalidRequest(error.message) from None


class LinkedHome:
    """One linked site. Times are of this gateway's clock."""

    def __init__(self) -> None:
        self.region = ""  # that of its link
        self.gateways: dict[str, float] = {}  # by id, when the last state came
        self.key: bytes | None = None  # checked with Redis
        self.rejected_key: bytes | None = None  # logged
        self.asked_at = -inf
        self.is_asked = self.has_tenants = False

    def gateway(self, now: float) -> str | None:
        """Returns the gateway to ask, the same as long as it sends its state."""
        self.gateways = {each: at for each, at in self.gateways.items() if now - at <= SILENT_S}
        return next(iter(self.gateways), None)


class LinkedHomes:
    def __init__(self, bus: Bus, clock: Clock, on_new: Callable[[str], None]) -> None:
        """`on_new` is called with each site that is heard for the first time."""
        self.by_site: dict[str, LinkedHome] = {}  # those of the servers' configuration
        self._bus = bus
        self._clock = clock
        self._on_new = on_new

    def observe(self, state: SiteState) -> None:
        """Takes the state of a gateway of a linked site."""
        site = site_of(state.gateway_id)
        if site not in self.by_site:
            self.by_site[site] = LinkedHome()
            self._on_new(site)
        self.by_site[site].region = state.region
        gateways = self.by_site[site].gateways
        if len(gateways) < MAX_GATEWAYS or state.gateway_id in gateways:
            gateways[state.gateway_id] = self._clock.now()

    def region_of(self, site: str) -> str | None:
        """Returns the region of a linked site, "" if it has none; None before its first state."""
        return self.by_site[site].region if site in self.by_site else None

    def is_heard(self, site: str) -> bool:
        home = self.by_site.get(site)
        return home is not None and home.gateway(self._clock.now()) is not None

    async def request(
        self, site: str, message: Message, reply_type: type[M], *, timeout_s: float
    ) -> M:
        """Returns the reply of a gateway of `site`. Raises its error, and DependencyUnavailable if
        none is heard; after that another gateway is asked the next time.
        """
        home = self.by_site.get(site)
        gateway_id = None if home is None else home.gateway(self._clock.now())
        if home is None or gateway_id is None:
            raise DependencyUnavailable(f"site {site!r} is not heard")
        try:
            return await self._bus.request(
                tenants(gateway_id), message, reply_type, timeout_s=timeout_s
            )
        except DependencyUnavailable:
            home.gateways.pop(gateway_id, None)
            raise

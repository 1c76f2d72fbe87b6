"""Checks that a message names its true sender, which the server enforces in the subject; for a
heartbeat also roles and region, and for what came over a link the site. Then that this process may
have its data: `shared/regions/region_check.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any

from shared.allowance import Allowance
from shared.errors import Overloaded, SenderMismatch
from shared.messages import Heartbeat, Message, SiteState, StartDecode
from shared.regions.region_check import RegionCheck
from shared.subjects import (
    announced_by,
    gateway_at_site,
    is_at_site,
    is_gateway_of,
    is_site_state,
    owner_of,
    region_of_site,
    sender_of,
    site_of,
)
from shared.transport.site_bytes import RefusedSites, SiteBytes

Decode = Callable[[bytes], Any]
# Of one site: more than the states of four gateways with 1024 models take. To decode these bytes
# takes 80 ms.
STATE_BYTES_PER_S = 512 * 2**10


class SenderCheck:
    """Checks all messages that one bus receives, and counts those that name a wrong sender, and the
    bytes of other sites.
    """

    def __init__(
        self, now: Callable[[], float] = monotonic, regions: RegionCheck | None = None
    ) -> None:
        self.num_sender_mismatches = 0
        self._regions = RegionCheck() if regions is None else regions
        self.site_bytes = SiteBytes()
        self.refused_sites = RefusedSites()
        self._now = now
        self._state_bytes: dict[str, Allowance] = {}  # by site: those of the configuration

    def checked(self, decode: Decode, wire_subject: str) -> Decode:
        """Returns a decoder for bytes from `wire_subject`; it also raises SenderMismatch,
        OutsideRegions, and Overloaded for states of a site beyond STATE_BYTES_PER_S.
        """

        site = site_of(wire_subject)

        def decode_checked(data: bytes) -> Any:
            if site is not None:
                self.site_bytes.received[site] += len(data)
                if is_site_state(wire_subject):
                    self._check_state_bytes(site, len(data))
                else:
                    self.refused_sites.check(site)
            message = decode(data)
            try:
                self._check(message, sender_of(wire_subject))
                if isinstance(message, Heartbeat):
                    self._check_announcement(message, wire_subject)
                elif site is not None:
                    self._check_site(message, site, wire_subject)
            except SenderMismatch as error:
                if site is not None and isinstance(message, SiteState):
                    self.refused_sites.on_state(site, error.message)
                raise
            self._regions.check_received(message, wire_subject)
            return message

        return decode_checked

    def _check_state_bytes(self, site: str, num_bytes: int) -> None:
        now = self._now()
        allowance = self._state_bytes.get(site)
        if allowance is None:
            allowance = self._state_bytes[site] = Allowance(STATE_BYTES_PER_S, 1.0, now)
        if not allowance.takes(num_bytes, now):
            most = STATE_BYTES_PER_S // 2**10
            raise Overloaded(f"site {site} sends more than {most} KiB of states a second")

    def check_reply(self, subject: str, reply: Message) -> None:
        """Raises SenderMismatch if the reply is not from the addressed process. A reply from a
        group subject may come from any member.
        """
        owner_id = owner_of(subject)
        if owner_id is not None:
            self._check(reply, owner_id)

    def _check_announcement(self, message: Heartbeat, wire_subject: str) -> None:
        """Checks roles and region of a heartbeat, which are the credential's, not the
        process's choice.
        """
        roles, region = announced_by(wire_subject)
        may_have_roles = message.roles == roles or set(roles).issuperset(message.roles)
        if message.region != region or not may_have_roles:
            self.num_sender_mismatches += 1
            claimed = f"{', '.join(message.roles)} in region {message.region!r}"
            allowed = f"{', '.join(roles)} in {region!r}"
            raise SenderMismatch(f"{message.process_id} claims {claimed}; its subject is {allowed}")

    def _check_site(self, message: Message, site: str, wire_subject: str) -> None:
        """Checks what came over a link: the owner of a request, and the region of a site, which is
        in the configuration of this site's servers.
        """
        reason = None
        if isinstance(message, StartDecode):
            owner = message.request.gateway_id
            if not is_gateway_of(owner, site):
                reason = f"site {site} sent a request of {owner}"
        elif isinstance(message, SiteState):
            region = region_of_site(wire_subject)
            if message.region != region:
                claimed, linked = message.region or "none", region or "none"
                reason = f"site {site} claims the region {claimed}; that of its link is {linked}"
        if reason is not None:
            self.num_sender_mismatches += 1
            raise SenderMismatch(reason)

    def _check(self, message: Message, sender_id: str) -> None:
        named = message.sender_id
        if named is not None and is_at_site(named):  # a gateway's worker for one model
            named = gateway_at_site(named)
        if named not in (None, sender_id):
            self.num_sender_mismatches += 1
            name = type(message).__name__
            raise SenderMismatch(f"{sender_id} sent a {name} that names {message.sender_id}")

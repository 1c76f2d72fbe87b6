"""Reports the usage of other sites' tenants to their homes. What is not sent yet is in Redis."""

from __future__ import annotations

from collections import Counter
from itertools import count

import structlog

from services.gateway.sites.linked_homes import LinkedHomes, site_of
from shared.background import failing_alone
from shared.clock import Clock
from shared.errors import HearthError, InvalidRequest, Overloaded
from shared.messages import Done, ReportUsage
from shared.store import Store, StoreUnavailable
from shared.subjects import SITE_SEPARATOR
from shared.telemetry.log_limit import LogLimit
from shared.tenancy.site_usage import UNMARK_LUA, USAGE_UNSENT, reports_of, tenant_and_day

log = structlog.get_logger(__name__)

REPORT_S = 1.0
MAX_PER_ROUND = 16  # of each site
MAX_REMEMBERED = 8192
TIMEOUT_S = 2.0
MAX_REASON = 200  # characters of what another site says


class UsageReporter:
    def __init__(self, homes: LinkedHomes, clock: Clock, store: Store, *, gateway_id: str) -> None:
        self._homes = homes
        self._clock = clock
        self._store = store
        self._name = gateway_id
        self._lines = LogLimit(clock.now)
        # records that were reported, the latest last: what is used all the time is always marked
        self._reported: dict[bytes, int] = {}
        self._numbers = count()

    async def run(self) -> None:
        while True:
            await self._clock.sleep(REPORT_S)
            with failing_alone("usage_not_reported"):
                await self.report()

    async def report(self) -> None:
        """Reports what has changed since its last report, of sites that are heard: first what has
        waited for longest.
        """
        try:
            marks = await self._store.hash_get(USAGE_UNSENT)
        except StoreUnavailable:
            return
        num_sent, silent = Counter[str](), set()
        for key, mark in sorted(marks.items(), key=lambda each: self._reported.get(each[0], -1)):
            text = key.decode(errors="replace")
            found = tenant_and_day(text)
            if found is None:
                continue
            site = site_of(found[0])
            is_enough = site in silent or num_sent[site] >= MAX_PER_ROUND
            if is_enough or not self._homes.is_heard(site):
                continue
            num_sent[site] += 1
            self._remember(key)
            try:
                await self._report(text, mark, *found)
            except HearthError as error:
                if not isinstance(error, Overloaded):  # that is of one tenant
                    silent.add(site)
                log.debug("usage_not_reported", site=site, error=error.message)

    def _remember(self, key: bytes) -> None:
        self._reported.pop(key, None)
        self._reported[key] = next(self._numbers)
        if len(self._reported) > MAX_REMEMBERED:
            del self._reported[next(iter(self._reported))]

    async def _report(self, key: str, mark: bytes, name: str, day: str) -> None:
        """Raises the errors of the home site, and StoreUnavailable."""
        site, _, tenant_id = name.partition(SITE_SEPARATOR)
        fields = await self._store.hash_get(key)
        try:
            for totals in reports_of(fields):
                command = ReportUsage(
                    gateway_id=self._name, tenant_id=tenant_id, day=day, totals=totals
                )
                await self._homes.request(site, command, Done, timeout_s=TIMEOUT_S)
        except InvalidRequest as error:  # it will never take this one
            reason = error.message[:MAX_REASON]
            self._lines.write(
                log.warning, "usage_rejected", site, tenant=name, day=day, error=reason
            )
        await self._store.evaluate(UNMARK_LUA, [USAGE_UNSENT], [key, mark])

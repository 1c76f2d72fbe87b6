"""A gateway process without its web server: keys, limits, usage, health and recovery are real."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from services.gateway.models.live_models import Catalog
from services.gateway.streams.actions import Report
from services.gateway.streams.early_entries import RetiredPlacements
from services.gateway.streams.queued_openings import Opening
from services.gateway.tenancy.api_keys import ApiKeys
from services.gateway.tenancy.limits import Limits
from services.gateway.tenancy.region_changes import RegionChanges, changed_regions
from services.gateway.tenancy.region_rule import RegionRule
from services.gateway.tenancy.request_cost import LimitLease, RequestCost
from services.gateway.tenancy.usage_counter import UsageCounter
from shared.background import Background
from shared.errors import HearthError, NoCapacity, PromptTooLong
from shared.regions.region_classes import NO_CLASSES, RegionClasses
from shared.tenancy.tenant import TenantRecord
from tests.simulation.world.client import Client
from tests.support.world.bus import SimulatedNetwork
from tests.support.world.gateway import StreamGateway
from tests.support.world.leaks import not_empty
from tests.support.world.process import ProcessClock
from tests.support.world.store import MemoryStore, ProcessStore
from tests.support.world.workers import MODEL


class ClientDisconnected(HearthError):
    code = "client_gone"


class WatchedPlacements(RetiredPlacements):
    """Reports each placement that the gateway gives up."""

    def __init__(self, on_given_up: Callable[[bytes], None]) -> None:
        super().__init__()
        self._on_given_up = on_given_up

    def add(self, placement_id: bytes, *, is_finished: bool, now: float) -> None:
        super().add(placement_id, is_finished=is_finished, now=now)
        if not is_finished:
            self._on_given_up(placement_id)


class SimulatedGateway(StreamGateway):
    def __init__(
        self,
        network: SimulatedNetwork,
        store: MemoryStore,
        gateway_id: str,
        *,
        seed: int,
        on_given_up: Callable[[bytes], None],
        on_report: Callable[[Report], None],
        site: str = "",
        region: str = "",
        classes: RegionClasses = NO_CLASSES,
    ) -> None:
        super().__init__(
            network,
            gateway_id,
            seed=seed,
            on_report=on_report,
            site=site,
            region=region,
            classes=classes,
        )
        self._clock = clock = ProcessClock(self.process)
        self.catalog = Catalog(self.health_monitor.fleet, MODEL, clock)
        self.streams = self.driver._streams
        self.streams._retired = WatchedPlacements(on_given_up)
        self.clients: list[Client] = []
        self._background = Background()
        connection = ProcessStore(store, self.process)
        classes, refusals = self.bus.regions.classes, self.health_monitor.refusals
        self._rule = RegionRule(region, classes, refusals, is_linked=bool(site))
        self._api_keys = ApiKeys(connection, clock, rule=self._rule)
        self._limits = Limits(connection, clock)
        self._region_changes = RegionChanges(connection, clock, self._regions_changed)
        writer_id = f"{gateway_id}-{seed}"
        self._usage = UsageCounter(connection, clock, writer_id=writer_id, now=store.now)

    async def start(self) -> None:
        await self.driver.start()
        await self._api_keys.warm_up()
        self._limits.start()
        self._background.start_own(self._region_changes.run())
        self._usage.start()
        self.health_monitor.on_heartbeat(self.catalog.observe)
        self.health_monitor.on_lost(lambda process_id, _: self.catalog.lost(process_id))
        await self.join()

    async def serve(self, client: Client) -> None:
        """Serves a client's request until its response ends or the client leaves."""
        self.clients.append(client)
        plan, client.was_sent, client.sent_at = client.plan, True, self._clock.now()
        try:
            self._choose_block_size(client)
            record = await self._api_keys.tenant_of(f"Bearer {plan.tenant_id}")
            lease = await self._limits.admit(record, plan.request_id, cost_of(client))
            try:
                self.check_ready()
            except NoCapacity:
                self._limits.settle(lease, 0)
                raise
        except HearthError as error:
            client.rejection, client.ended_at = error, self._clock.now()
            return
        client.gateway_id = self.process.process_id
        client.opened_at = self._clock.now()
        client.on_ended = partial(self._close, lease)
        request = client.request(record, client.gateway_id)
        self.driver.open([Opening(request, client)])
        if plan.leaves_after_s is not None:
            await self._clock.sleep(plan.leaves_after_s)
            client.left = client.end is None
            self.driver.close(plan.request_id, "client_gone", ClientDisconnected("gone"))

    def _choose_block_size(self, client: Client) -> None:
        """Of the request's hashes. Raises PromptTooLong, like `RequestBuilder`: workers of another
        block size do not count. Without a card the request waits at its scheduler.
        """
        for card in self.catalog.cards():
            client.block_size = card.block_size
            if client.plan.num_context_tokens > card.max_context_tokens:
                raise PromptTooLong(f"exceeds the context of {card.max_context_tokens}")

    def _regions_changed(self, tenant_id: str, record: TenantRecord | None) -> None:
        self._api_keys.forget(tenant_id)
        self.driver.change_regions(changed_regions(tenant_id, record, self._rule))

    async def stop(self) -> None:
        await self._background.stop()
        await self.end_streams()
        await self._usage.stop()
        await self._limits.stop()
        await self.leave()

    def _close(self, lease: LimitLease, client: Client) -> None:
        """Called at the end of a request that was admitted."""
        self._limits.settle(lease, client.num_output_tokens)
        model, counts = client.plan.request_id, {"requests": 1}
        counts["output_tokens"] = client.num_output_tokens
        self._usage.count(lease.tenant, model, counts)  # type: ignore[arg-type]

    def drop_links(self) -> None:
        """Does nothing: a gateway has no links."""

    def leaks(self) -> list[str]:
        streams = self.streams
        return not_empty(
            open_requests=streams._by_request,
            placements=streams._by_placement,
            early_entries=streams._early,
            permits=range(self._limits.num_open),
            untold_endings=range(self._limits.num_unsettled),
            unwritten_usage=range(self._usage.num_pending),
            placements_of_sites=self.sites._placements._placements,
        )


def cost_of(client: Client) -> RequestCost:
    plan = client.plan
    num_output = 0 if plan.pooling is not None else plan.num_choices * plan.sampling.max_tokens
    return RequestCost(len(plan.prompt), num_output)

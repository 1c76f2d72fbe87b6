"""A simulated gateway with what it writes down of a request: stored responses, timelines, spans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from services.gateway.dialects.responses.ids import response_id
from services.gateway.dialects.responses.storage.record import ResponseRecord
from services.gateway.dialects.responses.storage.store import ResponseStore
from services.gateway.observability.telemetry.spans import SpanBatch
from services.gateway.observability.telemetry.telemetry import RequestTelemetry
from services.gateway.observability.telemetry.trace_context import TraceContext
from services.gateway.observability.telemetry.traced_request import AttributeValue, TracedRequest
from services.gateway.sites.site_tenants import SiteTenants
from services.gateway.streams.receiver import StreamEnd
from services.gateway.tenancy.request_cost import LimitLease
from services.gateway.tenancy.stores import GatewayStores
from services.gateway.tenancy.tenancy import Tenancy
from shared.telemetry.timeline import Timeline
from shared.tenancy.tenant import TenantRecord
from tests.simulation.world.client import Client
from tests.simulation.world.gateway import SimulatedGateway
from tests.support.world.bus import SimulatedNetwork
from tests.support.world.process import ProcessClock
from tests.support.world.randomness import SeededRandomness
from tests.support.world.store import MemoryStore, ProcessStore

MAX_STORED_BYTES = 1 << 30
OBSERVED_EACH = 8  # one request of so many is traced, logged, and stores its response


@dataclass(frozen=True, slots=True)
class _Output:
    """An `EndedOutput`."""

    request_id: str
    num_prompt_tokens: int
    end: StreamEnd | None
    num_cached_tokens: int | None
    num_output_tokens: int
    outcome: str
    num_reasoning_tokens: int = 0


class SearchedTracing:
    """A `Tracing` whose spans go to a search."""

    num_dropped = 0

    def __init__(self, random_bytes: Callable[[int], bytes], take: Callable[[bytes], None]) -> None:
        self._random_bytes, self._take = random_bytes, take

    async def open(self) -> None:
        """Does nothing."""

    async def close(self) -> None:
        """Does nothing."""

    def begin(self, header: str | None) -> TraceContext:
        return TraceContext(self._random_bytes(16), self._random_bytes(8), is_sampled=True)

    def ended(
        self,
        timeline: Timeline,
        encoded: bytes,
        context: TraceContext,
        attributes: Mapping[str, AttributeValue],
        regions: Mapping[str, str],
    ) -> None:
        batch = SpanBatch()
        batch.add(
            TracedRequest(
                timeline=msgspec.Raw(encoded),
                trace_id=context.trace_id,
                span_id=context.span_id,
                parent_id=context.parent_id,
                attributes=attributes,
                regions=regions,
            )
        )
        self._take(batch.request.SerializeToString())


class RegionGateway(SimulatedGateway):
    take_spans: Callable[[bytes], None]
    text_of: Callable[[str], str]  # of a tenant

    def __init__(
        self, network: SimulatedNetwork, store: MemoryStore, gateway_id: str, **options: Any
    ) -> None:
        super().__init__(network, store, gateway_id, **options)
        self._region, self._seed = options["region"], options["seed"]
        self._store = ProcessStore(store, self.process)
        tenancy = Tenancy(
            self.config,
            GatewayStores.of_one(self._store),
            self._clock,
            store.now,
            num_gateways=lambda: 1,
            writer_id=f"{gateway_id}-{self._seed}",
            refusals=self.health_monitor.refusals,
        )
        self._api_keys, self._limits, self._usage = tenancy.api_keys, tenancy.limits, tenancy.usage
        self.sites._over_sites = SiteTenants(
            self.config,
            self.bus,
            self._clock,
            tenancy,
            self.health_monitor,
            wall_clock=store.now,
        )
        self._num_ended = 0

    @cached_property
    def _telemetry(self) -> RequestTelemetry:
        return RequestTelemetry(
            self.process.process_id,
            self._clock,
            self._clock.now,
            SearchedTracing(SeededRandomness(self._seed).bytes, self.take_spans),
        )

    @cached_property
    def _responses(self) -> ResponseStore:
        return ResponseStore(
            self._store,
            ProcessClock(self.process),
            region=self._region,
            now=self._clock.now,
            count=lambda outcome: None,
            max_all_bytes=lambda: MAX_STORED_BYTES,
        )

    def _close(self, lease: LimitLease, client: Client) -> None:
        super()._close(lease, client)
        self._num_ended += 1
        if self._num_ended % OBSERVED_EACH == 0:
            self._trace(lease.tenant, client)
            self._store_response(lease.tenant, client)

    def _trace(self, tenant: TenantRecord, client: Client) -> None:
        plan, model = client.plan, client.plan.model
        record = self._telemetry.begin(plan.request_id)
        record.tenant_id, record.arrived_at = tenant.tenant_id, client.sent_at
        record.begin("submit", client.sent_at)
        outcome = "length" if client.end is None or client.end.error is None else "error"
        output = _Output(
            plan.request_id, len(plan.prompt), client.end, 0, client.num_output_tokens, outcome
        )
        self._telemetry.ended(record, model, [output])
        self._telemetry.closed(record, model, [output])

    def _store_response(self, tenant: TenantRecord, client: Client) -> None:
        if self._responses.may_store(tenant):
            text, ids = self.text_of(tenant.tenant_id), client.choices[0].token_ids
            record = ResponseRecord(
                id=response_id(client.plan.request_id),
                input=msgspec.json.encode([{"role": "user", "content": text}]),
                response=msgspec.json.encode({"output": [text, ids]}),
            )
            self._responses.save(tenant, record)

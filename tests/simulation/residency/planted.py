"""Leaks that every run plants, one of each form, to show that its search finds them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import structlog

from services.gateway.observability.telemetry.spans import SpanBatch
from shared.messages import PrefixDigest
from shared.packing import pack_token_ids
from shared.sites.prefix_fingerprints import pack_fingerprints
from tests.simulation.checks.expected import states_of
from tests.simulation.residency.canaries import canary_of, fingerprints_of
from tests.simulation.residency.plan import PLANTED, REGIONS, all_tenants
from tests.simulation.residency.world import RegionFleet, ResidencyFleets
from tests.support.records import frame_header

log = structlog.get_logger(__name__)

SITE = "c"  # in a region that the planted tenant is not allowed in
LEAK = "hearth.v1.planted.0.leak"
FORMS = frozenset({"subject", "Redis", "frame", "digest", "memory", "span", "log", "file"})


async def plant(fleets: ResidencyFleets, folder: Path) -> None:
    """`folder` has the files of the run."""
    fleet, tenant = fleets.fleets[SITE], all_tenants()[PLANTED]
    canary = canary_of(tenant)
    bus = fleet.network.bus("planted-0")
    fleets.regions_of[bus.process] = REGIONS[SITE]
    bus.publish_bytes(LEAK, pack_token_ids(tenant.stem))
    (fingerprint, *_) = fingerprints_of([tenant])
    digest = PrefixDigest(
        gateway_id="planted-0",
        epoch=1,
        sequence_number=1,
        added=pack_fingerprints([fingerprint]),
        region_class=tenant.limits.region_class,
    )
    bus.publish_bytes(f"{LEAK}.digest", msgspec.msgpack.encode(digest))
    await fleet.store.write([("SET", f"hearth:planted:{canary.block_hashes[0].hex()}", "1")])
    kv = b"".join(states_of(tenant.stem))
    for tap in fleet.plane.taps:
        tap(bus.process, bus.process, frame_header(len(kv)), kv)
    spans = SpanBatch()
    spans.new_span("gateway", "gateway-0", name=tenant.text)
    fleets.traffic.span(spans.request.SerializeToString())
    log.info("planted", messages=[tenant.text])
    (folder / "planted.json").write_bytes(msgspec.json.encode({"prompt": tenant.stem}))


def plant_in_cache(fleets: ResidencyFleets) -> None:
    """Called after the last step, which could overwrite it."""
    fleet = fleets.fleets[SITE]
    assert isinstance(fleet, RegionFleet)
    states = b"".join(states_of(all_tenants()[PLANTED].stem))
    memory = fleet.workers_at_home()[0].executor._states
    memory[: len(states)] = states

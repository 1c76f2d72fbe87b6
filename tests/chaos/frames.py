"""Spoilt KV frames under load: detected, counted, recomputed; never served."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import msgspec

from tests.chaos.chaos import Chaos
from tests.chaos.checks.logs import events
from tests.chaos.checks.monitor import Monitor
from tests.chaos.world.relay import HOST, Relay, Transport
from tests.chaos.world.spoiling import SPOILINGS, Spoiling
from tests.support.cluster.chaos_cluster import ChaosCluster
from tests.support.waiting import NotReached

SHARE = 0.4  # of the frames: enough others arrive to show that they are unaffected
# The relay reads and alters records, which it could not if they were sealed.
WORKERS_APART = {"data-plane-advertised-host": HOST, "data-plane-security": "none"}
FOUND = (
    "num_corrupt_kv_frames",
    "num_unknown_kv_frames",
    "num_refused_kv_frames",
    "num_bad_kv_peers",
)


class FrameRow(msgspec.Struct, kw_only=True):
    """The effect of one way of spoiling on a run of 32 streams. `found` is what decode workers
    counted, `tries_failed` the deliveries that they gave up for it.
    """

    fault: str
    process: str
    streams: int
    frames: int
    spoilt: int
    corrupt: int
    unknown: int
    refused: int
    bad_peers: int
    tries_failed: int
    lost: int
    altered: int
    whole_after_s: float | None

    @property
    def found(self) -> int:
        return self.corrupt + self.unknown + self.refused + self.bad_peers

    @property
    def missed(self) -> int:
        """Undetected spoilt frames; 0 if a connection ended, which covers the frames in it."""
        return 0 if self.bad_peers else max(0, self.spoilt - self.found)

    @property
    def is_bad(self) -> bool:
        is_wrong = bool(self.lost or self.altered or self.whole_after_s is None)
        return is_wrong or bool(self.missed) or not self.found

    def __str__(self) -> str:
        fields = msgspec.to_builtins(self).items()
        return "  ".join(f"{v:12}" if isinstance(v, str) else f"{name} {v}" for name, v in fields)


@contextlib.asynccontextmanager
async def relays(
    cluster: ChaosCluster, monitor: Monitor, transport: Transport
) -> AsyncIterator[list[Relay]]:
    """One relay per decode worker, to which no prefill worker may have connected yet."""
    frame_relays, names = [], cluster.named("decode")
    await monitor.wait(lambda: monitor.newest.keys() >= set(names))
    for seed, name in enumerate(names):
        (target,) = monitor.newest[name].kv_targets
        frame_relays.append(Relay(target.address, transport, seed=seed))
    try:
        yield frame_relays
    finally:
        for relay in frame_relays:
            relay.close()


async def run_frames(
    chaos: Chaos, frame_relays: list[Relay], transport: Transport, *spoilings: Spoiling
) -> FrameRow:
    """Spoils in all ways at random if none is given."""
    for relay in frame_relays:
        relay.spoiler.start(spoilings or SPOILINGS, SHARE)
    before, failed_before = await _counted(chaos), _num_failed_tries(chaos)
    sent = await chaos.run()
    for relay in frame_relays:
        relay.spoiler.stop()
    try:
        whole_after_s: float | None = round(await chaos.wait_until_empty(), 3)
    except NotReached:
        whole_after_s = None
    after = await _counted(chaos)
    corrupt, unknown, refused, bad_peers = (a - b for a, b in zip(after, before, strict=True))
    return FrameRow(
        fault="+".join(spoilings) or "any",
        process=f"frames, {transport}",
        streams=len(sent),
        frames=sum(relay.spoiler.num_frames for relay in frame_relays),
        spoilt=sum(relay.spoiler.done.total() for relay in frame_relays),
        corrupt=corrupt,
        unknown=unknown,
        refused=refused,
        bad_peers=bad_peers,
        tries_failed=_num_failed_tries(chaos) - failed_before,
        lost=sum(not each.last.is_successful for each in sent),
        altered=sum(not chaos.is_same(index, each.last) for index, each in enumerate(sent)),
        whole_after_s=whole_after_s,
    )


async def _counted(chaos: Chaos) -> list[int]:
    """The decode workers' counts so far, from new heartbeats."""
    monitor, names = chaos.monitor, chaos.cluster.named("decode")
    monitor.newest.clear()
    await monitor.wait(lambda: monitor.newest.keys() >= set(names))
    loads = [monitor.newest[name].load for name in names]
    return [sum(getattr(load, each) for load in loads) for each in FOUND]


def _num_failed_tries(chaos: Chaos) -> int:
    names = chaos.cluster.named("decode")
    return sum(len([*events(chaos.cluster, name, "prefill_attempt_failed", 0.0)]) for name in names)

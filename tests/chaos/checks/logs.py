"""Reads the services' logs: one JSON object per line."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

import msgspec

from tests.chaos.world.cluster import ChaosCluster

SUSPICIONS = ("silent", "stuck", "gone")
NEVER_BEGUN = ("is not alive", "nobody serves")  # why a try ends that needs no giving up


def events(cluster: ChaosCluster, name: str, event: str, since: float) -> Iterator[dict[str, Any]]:
    """Events of one kind, with `at`, which like `since` is wall-clock time in seconds."""
    for line in cluster.log_of(name).splitlines():
        if f'"event": "{event}"' in line:
            told = msgspec.json.decode(line)
            told["at"] = datetime.fromisoformat(told["timestamp"]).timestamp()
            if told["at"] >= since:
                yield told


def suspicions(cluster: ChaosCluster, victim: str | None, since: float) -> list[str]:
    """Which process suspected which other one, among those without a fault."""
    return [
        f"{name} of {told['peer']}: {told['loss']}"
        for name in cluster.services
        for told in events(cluster, name, "peer_lost", since)
        if told["loss"] in SUSPICIONS and told["peer"] != victim
    ]


def given_up(cluster: ChaosCluster, prefill: str, since: float) -> list[float]:
    """When decode workers gave up a try in progress on this prefill worker."""
    return [
        told["at"]
        for name in cluster.named("decode")
        for told in events(cluster, name, "prefill_attempt_failed", since)
        if told["prefill"] == prefill and not any(w in told["reason"] for w in NEVER_BEGUN)
    ]

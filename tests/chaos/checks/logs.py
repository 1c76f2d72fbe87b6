"""Reads the services' logs: one JSON object per line."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

import msgspec

from tests.support.cluster.chaos_cluster import ChaosCluster

SUSPICIONS = ("silent", "stuck", "gone")
NEVER_BEGUN = ("is not alive", "nobody serves")  # why a try ends that needs no giving up


def events(cluster: ChaosCluster, name: str, event: str, since: float) -> Iterator[dict[str, Any]]:
    """Events of one kind, with `at`, which like `since` is wall-clock time in seconds."""
    for line in cluster.log_of(name).splitlines():
        if f'"event": "{event}"' in line:
            record = msgspec.json.decode(line)
            record["at"] = datetime.fromisoformat(record["timestamp"]).timestamp()
            if record["at"] >= since:
                yield record


def suspicions(cluster: ChaosCluster, victim: str | None, since: float) -> list[str]:
    """Which process suspected which other one, among those without a fault."""
    return [
        f"{name} of {record['peer']}: {record['loss']}"
        for name in cluster.services
        for record in events(cluster, name, "peer_lost", since)
        if record["loss"] in SUSPICIONS and record["peer"] != victim
    ]


def given_up(cluster: ChaosCluster, worker: str, since: float) -> list[float]:
    """When other workers gave up a try in progress on this prefill or encode worker."""
    role = worker.partition("-")[0]
    return [
        record["at"]
        for name in (*cluster.named("decode"), *cluster.named("prefill"))
        for record in events(cluster, name, f"{role}_attempt_failed", since)
        if record[role] == worker and not any(w in record["reason"] for w in NEVER_BEGUN)
    ]

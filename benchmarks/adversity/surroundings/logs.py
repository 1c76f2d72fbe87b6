"""L1: logs that cannot be written, of all processes, while workers die under requests.

On a full disk, on a pipe that nobody reads, and on one whose reader has gone. Each case kills a
decode worker, a scheduler that may hold the requests, and the index.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.report import Bar, at_least, at_most
from benchmarks.serving.cluster import events_of
from tests.support.cluster.chaos_cluster import SERVICES
from tests.support.services.unwritable_logs import MutedCluster, full_disk, stopped_reader

KILLED = ("decode-1", "scheduler-1", "kv_index-1")
NUM_REQUESTS = 4 * len(KILLED)
UNREAD = "pipe that nobody reads"
Mute = Callable[[str, Path], int | None]
CASES: dict[str, Mute] = {
    "full disk": lambda name, log: full_disk(log),
    UNREAD: lambda name, log: stopped_reader(log),
    "pipe without a reader": lambda name, log: stopped_reader(log),
}


async def measure(rows: Sequence[str]) -> list[Bar]:
    assert "L1" in rows
    bars = []
    for case, mute in CASES.items():
        with TemporaryDirectory(prefix="hearth-logs-") as name:
            cluster = MutedCluster(Path(name), mute)
            try:
                bars += await _measured(cluster, case)
            finally:
                cluster.stop()
                cluster.close_readers()
    return bars


async def _measured(cluster: MutedCluster, case: str) -> list[Bar]:
    await cluster.start()
    pids = {name: cluster.pid(name) for name in SERVICES if name not in KILLED}
    outcomes: list[str | BaseException] = []
    for name in KILLED:
        if case == "pipe without a reader":
            cluster.close_readers()
        outcomes += await cluster.replace(name)
    num_failed = sum(isinstance(each, BaseException) for each in outcomes)
    num_answered = len(outcomes) - num_failed
    num_ended = sum(not _lives(pid) for pid in pids.values())
    bars = [
        at_least(
            f"L1: {case}: requests answered", num_answered, NUM_REQUESTS, f"of {NUM_REQUESTS}"
        ),
        at_most(f"L1: {case}: requests failed", num_failed, 0, "requests"),
        at_most(f"L1: {case}: other processes ended", num_ended, 0, f"of {len(pids)}"),
    ]
    if case == UNREAD:  # in other cases nobody can read the report of a loss
        num_lost = await _num_lost_lines(cluster)
        bars.append(at_least(f"L1: {case}: lost lines that are counted", num_lost, 1, "lines"))
    return bars


async def _num_lost_lines(cluster: MutedCluster) -> int:
    """Returns how many lines the processes report as lost, after their pipes have room again.

    A process reports them with its next event, so one is replaced.
    """
    _drain(cluster)
    await cluster.replace(KILLED[0])
    text = _drain(cluster).decode(errors="replace")
    return sum(each["num_lines"] for each in events_of(text, "log_lines_dropped"))


def _drain(cluster: MutedCluster) -> bytes:
    found = []
    for reader in cluster.readers.values():
        with suppress(BlockingIOError):
            while data := os.read(reader, 1 << 16):
                found.append(data)
    return b"".join(found)


def _lives(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"

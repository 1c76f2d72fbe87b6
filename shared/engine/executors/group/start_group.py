"""Starts the rank processes of a worker, on a thread that lives as long as they do."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shared.engine.executors.group.joined_hosts import JoinedHosts, RankChannels
from shared.engine.executors.loading.load_options import OnPhase, ignore_phase
from shared.engine.parallel.mesh_shape import MeshShape
from shared.engine.parallel.processes.group import GroupSpec, RankGroup
from shared.engine.parallel.processes.watchdog import GroupLost
from shared.errors import CheckpointError

LOAD_TIMEOUT_S = 1800.0
# Ranks wait so long for each other: a first start compiles, which one of them may do long after
# another. Once steps run, their budgets end a group much earlier.
WAIT_S = 300.0


def group_spec(
    entry: str,
    config: bytes,
    shape: MeshShape,
    channels: RankChannels,
    *,
    num_threads: int,
    joined: JoinedHosts | None = None,
) -> GroupSpec:
    """Returns the spec of ranks with `num_threads` each."""
    joined = JoinedHosts() if joined is None else joined
    return GroupSpec(
        shape=shape,
        entry=entry,
        config=config,
        num_threads=num_threads,
        inherited=channels.inherited,
        transport=joined.transport,
        remote=joined.hosts,
        rendezvous=joined.rendezvous,
        address=joined.address,
        limit_s=WAIT_S,
        ready_s=LOAD_TIMEOUT_S,
        environment={"NUMBA_NUM_THREADS": str(num_threads)},
    )


def start_group(
    spec: GroupSpec, channels: RankChannels, model_dir: Path, on_phase: OnPhase = ignore_phase
) -> tuple[RankGroup, ThreadPoolExecutor]:
    """Returns the group once all ranks are ready, and the thread that started it, whose end ends
    the group. That thread calls `on_phase`. Raises CheckpointError, which says what a rank raised.
    """
    parent_thread = ThreadPoolExecutor(1, "group-parent")
    try:
        starting = parent_thread.submit(
            RankGroup.start, spec, lambda loading: on_phase(loading.phase)
        )
        return starting.result(), parent_thread
    except (GroupLost, ValueError) as error:
        raise CheckpointError(f"{model_dir}: {error}") from None
    finally:
        channels.close_inherited()

"""Waits until all ranks of a group are ready and alike."""

from __future__ import annotations

import time
from collections.abc import Sequence

from shared.engine.parallel.links import RankLink
from shared.engine.parallel.processes.rank_messages import (
    Failed,
    Go,
    GroupRejected,
    LoadingPhase,
    OnLoading,
    RankIdentity,
    Ready,
    difference,
)
from shared.engine.parallel.processes.watchdog import (
    TICK_S,
    GroupLost,
    Handle,
    StoppedRanks,
    ended,
    failure_of,
)


def shake_hands(
    handles: Sequence[Handle], ready_s: float, on_loading: OnLoading
) -> tuple[RankLink, ...]:
    """Returns the links that ranks measured; `on_loading` gets what they do before. Raises
    GroupLost, which names the rank that ended, is stopped or late, or differs; the others are told
    why.
    """
    try:
        found, links = _all_ready(handles, ready_s, on_loading)
        if (line := difference([found[each.rank] for each in handles])) is not None:
            raise GroupLost(line)
    except GroupLost as error:
        for each in handles:
            each.send(GroupRejected(str(error)))
        raise
    for each in handles:
        each.send(Go())
    return tuple(links)


def _all_ready(
    handles: Sequence[Handle], ready_s: float, on_loading: OnLoading
) -> tuple[dict[int, RankIdentity], list[RankLink]]:
    found: dict[int, RankIdentity] = {}
    links: list[RankLink] = []
    stopped = StoppedRanks()
    deadline = time.monotonic() + ready_s
    while missing := [each for each in handles if each.rank not in found]:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise GroupLost(f"rank {missing[0].rank} is not ready after {ready_s:g} s")
        if (line := stopped.check(handles)) is not None:
            raise GroupLost(line)
        for each in ended(handles, min(remaining_s, TICK_S)):
            if each.rank in found:
                if (reason := failure_of([each])) is not None:
                    raise GroupLost(reason)
                continue
            match each.receive():
                case Ready() as message:
                    found[each.rank] = message.identity
                    links += message.links
                case LoadingPhase() as message:
                    on_loading(message)
                case Failed(line=line):
                    raise GroupLost(f"rank {each.rank} failed: {line}")
                case None if each.has_ended():
                    raise GroupLost(f"rank {each.rank} ended: {each.ending()}")
    return found, links

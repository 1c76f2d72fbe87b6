"""One row: the host process is killed or frozen while streams of its hot models run.

Workers end with their host. A row must show: no stream of a hot model is lost or altered; a request
of another model is answered, or refused with 503 and a time; afterwards there is one worker a model
within the budget, each of which wakes again. A host that only froze replaces none of its workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import time
from typing import Literal

import msgspec

from shared.errors import HearthError
from shared.messages import Done, ModelWaking, ParkModel, WakeModel
from tests.chaos.hosts.site import (
    BUDGET_BYTES,
    HOST,
    MODELS,
    REQUEST_TIMEOUT_S,
    HostSite,
    is_log_of,
)
from tests.chaos.hosts.streams import HOT, Stream, Streams
from tests.support.waiting import NotReached

HostFault = Literal["kill", "freeze", "long freeze"]
HostPhase = Literal["hot", "waking", "parking", "starting"]

HOST_FAULTS: tuple[HostFault, ...] = ("kill", "freeze", "long freeze")
HOST_PHASES: tuple[HostPhase, ...] = ("hot", "waking", "parking", "starting")
# The second is longer than schedulers wait for a host, and than the host waits for its workers.
FROZEN_S: dict[HostFault, float] = {"freeze": 3.0, "long freeze": 24.0}
COLD = "c"  # not hot when the fault comes
NUM_FIRST_EVENTS = 3  # that each stream has received before the fault
SILENCE = b'"delta":{}'
NUM_LATE = 2  # requests of each model during the fault
LATE_AFTER_S = 0.3
ROW_TIMEOUT_S = 90.0
SETTLED_TIMEOUT_S = 40.0


class HostRow(msgspec.Struct, kw_only=True):
    """Seconds. `refused`: 503 with a time. `lost`: neither complete nor refused, or refused though
    the model was hot. `replaced`: workers that a host has ended which was only frozen.
    """

    fault: str
    process: str = HOST
    phase: str
    streams: int
    lost: int
    altered: int
    resubmitted: int
    refused: int
    orphans: int  # processes of workers that no host owns
    doubled: int  # workers of one model, beyond one
    replaced: int
    over_budget_bytes: int
    not_woken: int  # models, afterwards
    longest_pause_s: float
    settled_after_s: float | None  # from the end of the fault; None: never
    reason: str = ""  # why the first of the lost ones was lost

    @property
    def is_bad(self) -> bool:
        wrong = self.lost + self.altered + self.orphans + self.doubled + self.replaced
        return bool(wrong + self.over_budget_bytes + self.not_woken or self.settled_after_s is None)

    def __str__(self) -> str:
        words = [f"{self.fault:12} {self.process:7} {self.phase:9}"]
        for name, value in msgspec.to_builtins(self).items():
            if isinstance(value, int | float):
                words.append(f"{name} {value:g}")
        return "  ".join([*words, self.reason])


async def run_host_row(streams: Streams, fault: HostFault, phase: HostPhase) -> HostRow:
    site = streams.site
    await _prepare(site)
    workers = site.worker_pids()
    sent = await _all_running(streams)
    waking = await _reach(phase, streams)
    spared = set(workers) if phase != "starting" else set(workers) - {_pid_of(workers, COLD)}
    ended = asyncio.create_task(_strike(site, fault))
    await asyncio.sleep(LATE_AFTER_S)
    late = [*waking, *(streams.send(each, n) for each in MODELS for n in range(NUM_LATE))]
    tasks = [each.task for each in (*sent, *late)]
    _, unfinished = await asyncio.wait(tasks, timeout=ROW_TIMEOUT_S)
    for task in unfinished:
        task.cancel()
    await ended
    began = time.monotonic()
    is_settled = await _settled(site)
    settled_after_s = round(time.monotonic() - began, 3) if is_settled else None
    living = site.worker_pids()
    refused = [each for each in late if each.model == COLD and _is_refused(each)]
    complete = [each for each in (*sent, *late) if each.exchange.is_successful]
    lost = [each for each in (*sent, *late) if each not in complete and each not in refused]
    return HostRow(
        fault=fault,
        phase=phase,
        streams=len(sent) + len(late),
        lost=len(lost),
        altered=sum(not streams.is_same(each) for each in complete),
        resubmitted=sum(
            each.exchange.metadata.get("num_resubmissions", 0) > 0 for each in complete
        ),
        refused=len(refused),
        orphans=len(living) - sum(_has_owned(site, living, name) for name in MODELS),
        doubled=sum(max(0, len(site.living_workers(name)) - 1) for name in MODELS),
        replaced=0 if fault == "kill" else len(spared - living.keys()),
        over_budget_bytes=max(0, site.used_bytes() - BUDGET_BYTES),
        not_woken=await _num_not_woken(streams),
        longest_pause_s=round(max(_pause(each) for each in sent), 3),
        settled_after_s=settled_after_s,
        reason=f"{lost[0].model}: {lost[0].exchange}" if lost else "",
    )


# ── before ───────────────────────────────────────────────────────────────────────────────────────


async def _prepare(site: HostSite) -> None:
    """Hot models, and one in standby."""
    for name in HOT:
        await site.wake(name)
    await site.park(COLD)
    await site.until(lambda: all(site.state(name) == "hot" for name in HOT))


async def _all_running(streams: Streams) -> list[Stream]:
    """Streams that run at the same time: on busy cores some end before others have begun."""
    async with asyncio.timeout(ROW_TIMEOUT_S):
        while True:
            sent = streams.send_all(HOT)
            while not all(_has_begun(each) or each.task.done() for each in sent):
                await asyncio.sleep(0.005)
            if not any(each.task.done() for each in sent):
                return sent
            await asyncio.gather(*(each.task for each in sent))


def _has_begun(stream: Stream) -> bool:
    return len(stream.exchange.arrivals) >= NUM_FIRST_EVENTS


async def _reach(phase: HostPhase, streams: Streams) -> list[Stream]:
    """Returns the requests that it has sent."""
    site = streams.site
    match phase:
        case "hot":
            return []
        case "waking":
            sent = streams.send(COLD, 0)
            await site.until(lambda: site.state(COLD) in ("waking", "hot"))
            return [sent]
        case "parking":
            parking = asyncio.create_task(_command(site, HOT[1], ParkModel, Done))
            await site.until(lambda: site.state(HOT[1]) == "parking" or parking.done())
            return []
        case "starting":
            os.kill(site.pid_of_worker(COLD), signal.SIGKILL)
            await site.until(lambda: site.state(COLD) == "starting")
            return [streams.send(COLD, 0)]


# ── the fault ────────────────────────────────────────────────────────────────────────────────────


async def _strike(site: HostSite, fault: HostFault) -> None:
    """Returns once the fault is over: at once after a kill. A frozen host gets commands that it
    carries out late.
    """
    pid = site.pid_of_host()
    if fault == "kill":
        os.kill(pid, signal.SIGKILL)
        return
    os.kill(pid, signal.SIGSTOP)
    late = [
        asyncio.create_task(_command(site, COLD, WakeModel, ModelWaking)),
        asyncio.create_task(_command(site, HOT[0], ParkModel, Done)),
    ]
    await asyncio.sleep(FROZEN_S[fault])
    os.kill(pid, signal.SIGCONT)
    await asyncio.gather(*late)


async def _command(
    site: HostSite,
    name: str,
    kind: type[WakeModel | ParkModel],
    reply_type: type[ModelWaking | Done],
) -> None:
    with contextlib.suppress(HearthError):  # refused, or nobody replies in time
        await site.command(name, kind, reply_type)


# ── afterwards ───────────────────────────────────────────────────────────────────────────────────


async def _settled(site: HostSite) -> bool:
    """Whether in time every model has one worker, which the host knows, within the budget."""
    site.forget()

    def is_settled() -> bool:
        models = [site.model(name) for name in MODELS]
        return site.used_bytes() <= BUDGET_BYTES and all(
            each is not None
            and each.state in ("hot", "standby")
            and site.living_workers(each.name) == [each.worker_id]
            for each in models
        )

    try:
        await site.until(is_settled, timeout_s=SETTLED_TIMEOUT_S)
    except NotReached:
        return False
    return True


async def _num_not_woken(streams: Streams) -> int:
    """Each model is parked, then answers a request as before."""
    count = 0
    for name in MODELS:
        await streams.site.park(name)
        stream = streams.send(name, 0)
        await stream.task
        count += not (stream.exchange.is_successful and streams.is_same(stream))
    return count


def _has_owned(site: HostSite, living: dict[int, str], model: str) -> bool:
    """Whether one of the processes is the worker that the host has of this model."""
    found = site.model(model)
    has_process = any(is_log_of(each, model) for each in living.values())
    return found is not None and found.worker_id is not None and has_process


def _pid_of(workers: dict[int, str], model: str) -> int:
    return next(pid for pid, each in workers.items() if is_log_of(each, model))


def _is_refused(stream: Stream) -> bool:
    """A response whose head had to be sent before ends with the error instead."""
    found = stream.exchange
    is_clear = len(found.errors) == 1 and b'"no_capacity"' in found.errors[0]
    is_in_time = found.ended - found.started < REQUEST_TIMEOUT_S
    has_status = found.status == 503 and found.has_retry_after
    return is_clear and is_in_time and (has_status or not found.has_output)


def _pause(stream: Stream) -> float:
    """Between tokens: a comment, or an empty chunk, only keeps the connection open."""
    found = zip(stream.exchange.events, stream.exchange.arrivals, strict=True)
    arrivals = [at for event, at in found if event.startswith(b"data: ") and SILENCE not in event]
    return max((b - a for a, b in itertools.pairwise(arrivals)), default=0.0)

"""Rolls of a fleet from one release to another, process by process, under streams."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import msgspec

from tests.skew.fleet import FLEET, RollingFleet
from tests.skew.releases import Release
from tests.skew.streams import Streams

ORDERS = ("gateways first", "workers first", "random")
_WORKERS = ("prefill", "decode")


class Roll(msgspec.Struct, kw_only=True):
    """One roll of all processes. Counts are of its streams alone."""

    order: str
    old: str
    new: str
    seconds: float
    answers: int
    lost: int
    altered: int
    refused: int
    resubmitted: int
    pushes: dict[str, int]  # answers whose KV came from a worker, by the releases of both workers
    stored: int  # responses that were read at the end
    unclean: list[str]  # processes that did not exit with 0


def order_of(name: str, seed: int, services: Sequence[str] = FLEET) -> list[str]:
    """Returns the processes in one of ORDERS."""
    if name == "random":
        return random.Random(seed).sample(services, len(services))
    is_first = {
        "gateways first": lambda each: each.startswith("gateway"),
        "workers first": lambda each: each.startswith(_WORKERS),
    }[name]
    return sorted(services, key=lambda each: not is_first(each))


async def roll(
    fleet: RollingFleet,
    streams: Streams,
    order: str,
    seed: int,
    old: Release,
    new: Release,
    *,
    is_back: bool,
) -> Roll:
    """Replaces each process of `old` by one of `new`. nats-server reads the configuration of the
    newer release before, and on the way back keeps it until no stream runs.
    """
    started, before = time.monotonic(), _counts(streams)
    unclean, pushed = [], streams.pushed.copy()
    async with streams:
        if not is_back:
            streams.step = "configuration"
            await fleet.configure(new)
        for name in order_of(order, seed, [*fleet.services]):
            streams.step = f"{name} to {new.name}"
            status = await fleet.replace(name, new)
            if status:
                unclean.append(f"{name}: {status}")
    if is_back:
        await fleet.configure(new)
    stored = await streams.read_stored()
    after = _counts(streams)
    return Roll(
        order=order,
        old=old.name,
        new=new.name,
        seconds=round(time.monotonic() - started, 1),
        pushes=dict(streams.pushed - pushed),
        stored=stored,
        unclean=unclean,
        **{name: after[name] - before[name] for name in after},
    )


def _counts(streams: Streams) -> dict[str, int]:
    return {
        "answers": streams.answered.total(),
        "lost": len(streams.lost),
        "altered": len(streams.altered),
        "refused": streams.refused.total(),
        "resubmitted": streams.num_resubmitted,
    }

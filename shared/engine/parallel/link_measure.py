"""Latency and rate of the links between ranks, measured as they join."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

import torch

from shared.engine.parallel.links import EXCHANGE_LATENCIES, Link, RankLink
from shared.engine.parallel.rank_mesh import Transport

SMALL_BYTES, LARGE_BYTES = 64, 512 * 1024
NUM_ROUNDS = 4  # rounds of each size; the first one may wait for the other rank


def measure_links(
    transport: Transport, hosts: Sequence[str], now: Callable[[], float] = time.perf_counter
) -> tuple[RankLink, ...]:
    """Returns the links that this rank measured with a higher one. `hosts` has each rank's host;
    `now` gives seconds.

    All ranks call it together. One pair stands for each host, and one for each two hosts.
    Raises RankLost.
    """
    found = []
    for pair in measured_pairs(hosts):
        if transport.rank not in pair:
            continue
        other = sum(pair) - transport.rank
        is_between = hosts[transport.rank] != hosts[other]
        small_s = _swap_s(transport, other, SMALL_BYTES, now)
        large_s = _swap_s(transport, other, LARGE_BYTES, now)
        link = _link_of(small_s, large_s, EXCHANGE_LATENCIES if is_between else 1)
        if transport.rank == pair[0]:
            found.append(RankLink(*pair, link))
    return tuple(found)


def measured_pairs(hosts: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Returns the first two ranks of each host, then the first ranks of each two hosts."""
    of_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        of_host.setdefault(host, []).append(rank)
    for ranks in of_host.values():
        if len(ranks) > 1:
            yield ranks[0], ranks[1]
    yield from combinations([ranks[0] for ranks in of_host.values()], 2)


def _link_of(small_s: float, large_s: float, num_latencies: int) -> Link:
    return Link(small_s / num_latencies, LARGE_BYTES / max(large_s - small_s, 1e-9))


def _swap_s(transport: Transport, other: int, num_bytes: int, now: Callable[[], float]) -> float:
    """Returns the shortest time in which both ranks have what the other one sent."""
    sent = torch.zeros(num_bytes, dtype=torch.uint8, device=transport.device)
    received, times = torch.empty_like(sent), []
    for _ in range(NUM_ROUNDS):
        began_at = now()
        transport.swap(sent, other, received)
        times.append(now() - began_at)
    return min(times[1:])

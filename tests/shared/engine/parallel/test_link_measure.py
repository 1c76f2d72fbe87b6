"""Ranks measure the links between them."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from shared.engine.parallel.link_measure import measure_links, measured_pairs
from shared.engine.parallel.links import RankLink
from shared.engine.parallel.mesh_shape import MeshShape
from tests.shared.engine.parallel.rank_threads import run_ranks

HOSTS = ("a", "a", "a", "b")


def test_a_pair_stands_for_each_host_and_each_two_hosts() -> None:
    assert list(measured_pairs(HOSTS)) == [(0, 1), (0, 3)]
    assert list(measured_pairs("abc")) == [(0, 1), (0, 2), (1, 2)]


def test_latency_and_rate_are_those_of_the_link() -> None:
    """Exchanges between the hosts take 2 ms, of two latencies, and 4 ns a byte."""

    def measured(mesh: Any) -> tuple[RankLink, ...]:
        transport, now_s = mesh.transport, 0.0
        swap = transport.swap

        def timed_swap(x: Tensor, rank: int, out: Tensor) -> None:
            nonlocal now_s
            swap(x, rank, out)
            now_s += 0.002 + x.numel() * 4e-9 if 3 in (rank, transport.rank) else 1e-5

        transport.swap = timed_swap
        return measure_links(transport, HOSTS, lambda: now_s)

    inside, between = sum(run_ranks(MeshShape(4), measured), ())
    assert (inside.first, inside.second, between.first, between.second) == (0, 1, 0, 3)
    assert between.link.latency_s >= 0.001 > inside.link.latency_s
    assert between.link.bytes_per_s == pytest.approx(250e6, rel=0.01)

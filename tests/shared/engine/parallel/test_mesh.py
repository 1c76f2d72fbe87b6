"""Sums have the same bits at every number of ranks, whichever way the ranks exchange them."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shared.engine.parallel.lane_sums import halved_range
from shared.engine.parallel.lanes import EMPTY_LANE, NUM_LANES, Exchange, rank_lanes
from shared.engine.parallel.mesh import LocalMesh, Mesh, best_of
from shared.engine.parallel.mesh_shape import MeshShape
from tests.shared.engine.parallel.rank_threads import run_ranks

GATHER, HALVE = 1 << 30, 0


def lanes_of(shape: tuple[int, ...], seed: int, num_empty: int = 0) -> Tensor:
    """Eight lanes whose sum changes with the order of additions."""
    generator = torch.Generator().manual_seed(seed)
    lanes = torch.randn(NUM_LANES, *shape, generator=generator)
    lanes *= torch.logspace(-3, 3, NUM_LANES).view(-1, *[1] * len(shape))
    for index in torch.randperm(NUM_LANES, generator=generator)[:num_empty]:
        lanes[index] = EMPTY_LANE
    return lanes


def own_lanes(mesh: Mesh, lanes: Tensor) -> Tensor:
    first, end = rank_lanes(mesh.shape.place(mesh.rank)[1], mesh.shape.tp)
    return lanes[first:end]


def bits(x: Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes()


def added(
    tp: int, lanes: Tensor, dtype: torch.dtype, exchange: Exchange, all_gather_bytes: int
) -> set[bytes]:
    shape = MeshShape(tp)
    sums = run_ranks(
        shape,
        lambda mesh: bits(mesh.add(own_lanes(mesh, lanes), dtype)),
        exchange,
        all_gather_bytes,
    )
    return set(sums)


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(
    rows=st.integers(1, 5),
    cols=st.integers(1, 37),
    num_empty=st.integers(0, 7),
    seed=st.integers(0, 1000),
    exchange=st.sampled_from(("fp32", "bf16")),
    dtype=st.sampled_from((torch.bfloat16, torch.float16, torch.float32)),
)
def test_sums_are_equal_at_every_number_of_ranks(
    rows: int, cols: int, num_empty: int, seed: int, exchange: Exchange, dtype: torch.dtype
) -> None:
    lanes = lanes_of((rows, cols), seed, num_empty)
    expected = {bits(LocalMesh(exchange).add(lanes, dtype))}
    for tp in (1, 2, 4, 8):
        for all_gather_bytes in (GATHER, HALVE):
            assert added(tp, lanes, dtype, exchange, all_gather_bytes) == expected


def test_sum_is_the_tree_of_eight_lanes_rounded_once() -> None:
    a = lanes_of((3, 5), 1)
    tree = ((a[0] + a[1]) + (a[2] + a[3])) + ((a[4] + a[5]) + (a[6] + a[7]))
    found = LocalMesh().add(a, torch.bfloat16)
    assert bits(found) == bits(tree.to(torch.bfloat16))
    assert bits(LocalMesh("bf16").add(a, torch.float32)) != bits(tree)


def test_bf16_exchange_rounds_every_node_below_the_root() -> None:
    def rounded(x: Tensor) -> Tensor:
        return x.bfloat16().float()

    a = rounded(lanes_of((4, 9), 2))
    pairs = [rounded(a[i] + a[i + 1]) for i in (0, 2, 4, 6)]
    fours = [rounded(pairs[0] + pairs[1]), rounded(pairs[2] + pairs[3])]
    assert bits(LocalMesh("bf16").add(a, torch.float32)) == bits(fours[0] + fours[1])


def test_bf16_exchange_sends_half_the_bytes() -> None:
    lanes = lanes_of((4, 64), 3)

    def sent(mesh: Mesh) -> int:
        mesh.add(own_lanes(mesh, lanes), torch.bfloat16)
        return mesh.transport.num_sent_bytes  # type: ignore[attr-defined]

    for tp in (2, 4):
        fp32 = run_ranks(MeshShape(tp), sent)
        bf16 = run_ranks(MeshShape(tp), sent, "bf16")
        assert fp32 == [2 * each for each in bf16]


def test_halving_sends_fewer_bytes_than_gathering() -> None:
    lanes = lanes_of((8, 64), 3)

    def sent(mesh: Mesh) -> int:
        mesh.add(own_lanes(mesh, lanes), torch.bfloat16)
        return mesh.transport.num_sent_bytes  # type: ignore[attr-defined]

    size = 8 * 64
    assert set(run_ranks(MeshShape(8), sent, "fp32", GATHER)) == {7 * 4 * size}
    assert set(run_ranks(MeshShape(8), sent, "fp32", HALVE)) == {7 * (4 + 2) * size // 8}


def test_sums_of_aligned_lanes_give_the_same_bits() -> None:
    lanes = lanes_of((2, 7), 5)
    expected = bits(LocalMesh().add(lanes, torch.bfloat16))
    pairs = lanes[::2] + lanes[1::2]
    assert bits(LocalMesh().add(pairs, torch.bfloat16)) == expected
    found = run_ranks(
        MeshShape(2),
        lambda mesh: bits(mesh.add(pairs[mesh.rank * 2 :][:2], torch.bfloat16)),
    )
    assert set(found) == {expected}


@pytest.mark.parametrize(
    ("lanes", "exchange"),
    [
        (torch.zeros(3, 4), "fp32"),
        (torch.zeros(16, 4), "fp32"),
        (torch.zeros(4, 4), "bf16"),
        (torch.zeros(0, 4), "fp32"),
        (torch.zeros(8, 4, dtype=torch.bfloat16), "fp32"),
    ],
)
def test_wrong_partial_sums_are_rejected(lanes: Tensor, exchange: Exchange) -> None:
    with pytest.raises(ValueError, match="partial sums"):
        LocalMesh(exchange).add(lanes, torch.bfloat16)


@given(st.sampled_from((1, 2, 4, 8)), st.integers(0, 100))
@settings(deadline=None, derandomize=True, database=None)
def test_halved_ranges_cover_every_element_once(tp: int, num_elements: int) -> None:
    ranges = [halved_range(rank, tp, num_elements) for rank in range(tp)]
    covered = sorted(i for begin, end in ranges for i in range(begin, end))
    assert covered == list(range(num_elements))


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_gather_joins_parts_in_the_order_of_ranks(tp: int) -> None:
    x = torch.arange(3 * 16).view(3, 16)
    parts = x.chunk(tp, dim=1)
    found = run_ranks(MeshShape(tp), lambda mesh: mesh.gather(parts[mesh.rank], 1))
    assert all(torch.equal(each, x) for each in found)


def test_gather_joins_uneven_parts() -> None:
    x = torch.arange(2 * 9).view(2, 9)
    sizes = (2, 0, 4, 3)
    parts = x.split(sizes, dim=1)
    found = run_ranks(MeshShape(4), lambda mesh: mesh.gather(parts[mesh.rank], 1, sizes))
    assert all(torch.equal(each, x) for each in found)
    with pytest.raises(ValueError, match="does not match"):
        run_ranks(MeshShape(2), lambda mesh: mesh.gather(x, 1, (8, 8)))


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_best_is_the_first_maximum_of_the_whole_row(tp: int) -> None:
    generator = torch.Generator().manual_seed(7)
    logits = torch.randint(0, 5, (12, 16), generator=generator).float()  # many ties
    logits[3, 9] = logits[3, 13] = float("nan")
    width = 16 // tp

    def best(mesh: Mesh) -> tuple[Tensor, Tensor]:
        part = logits[:, mesh.rank * width :][:, :width]
        ids = part.argmax(dim=1)
        return mesh.best(part.gather(1, ids[:, None])[:, 0], ids + mesh.rank * width)

    for values, ids in run_ranks(MeshShape(tp), best):
        assert torch.equal(ids, logits.argmax(dim=1))
        assert torch.equal(values.nan_to_num(99), logits.amax(dim=1).nan_to_num(99))


def test_best_of_equal_values_is_the_lowest_id() -> None:
    values = torch.tensor([[1.0, -torch.inf], [1.0, -torch.inf]])
    ids = torch.tensor([[9, 4], [3, 8]])
    assert best_of(values, ids)[1].tolist() == [3, 4]


def test_stages_pass_tensors_to_the_same_place_of_the_next_stage() -> None:
    shape = MeshShape(2, 3)

    def pass_on(mesh: Mesh) -> tuple[Tensor, int]:
        stage, tp_rank = shape.place(mesh.rank)
        x = torch.full((2, 3), float(tp_rank), dtype=torch.bfloat16)
        if stage > 0:
            x = mesh.recv((2, 3), torch.bfloat16) + 10
        if stage < shape.pp - 1:
            mesh.send(x)
        return x, tp_rank

    for rank, (x, tp_rank) in enumerate(run_ranks(shape, pass_on)):
        assert torch.equal(x, torch.full((2, 3), 10.0 * (rank // 2) + tp_rank).bfloat16())


def test_first_and_last_stage_have_no_neighbour() -> None:
    with pytest.raises(ValueError, match="last stage"):
        run_ranks(MeshShape(1, 1), lambda mesh: mesh.send(torch.zeros(1)))
    with pytest.raises(ValueError, match="first stage"):
        run_ranks(MeshShape(1, 1), lambda mesh: mesh.recv((1,), torch.float32))


def test_rank_and_place_are_inverse() -> None:
    shape = MeshShape(4, 3)
    places = [shape.place(rank) for rank in range(shape.num_ranks)]
    assert [shape.rank_of(*place) for place in places] == list(range(12))
    assert shape.stage_ranks(1) == (4, 5, 6, 7)
    assert shape.answering_rank == 8


@pytest.mark.parametrize(
    ("tp", "pp", "message"),
    [(3, 1, "size 3: it must be 1, 2, 4 or 8"), (1, 0, "size 0: it must be at least 1")],
)
def test_impossible_shapes_are_rejected(tp: int, pp: int, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        MeshShape(tp, pp)

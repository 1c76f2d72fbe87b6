"""A weight is restored from its split form bit for bit, for any bits; sizes of the form."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import ops
from kernels import split_weight as form
from kernels.check_tensor import BadTensor
from kernels.device import IS_INTERPRETED
from kernels.reference.decompress import decompress
from kernels.split_weight import GROUP, SplitWeight, split_weight
from kernels.torch_ops.select_rows import select_rows
from tests.support.kernels.split_weights import (
    all_bit_patterns,
    bits_of,
    normal_weight,
    with_outliers,
)
from tests.support.kernels.tolerance import assert_near

SHAPES = [(1, 1), (3, 63), (5, 64), (7, 100), (2, 128), (33, 129), (40, 384), (65, 600), (3, 4225)]


def _split(weight: Tensor) -> SplitWeight:
    split = split_weight(weight, is_always=True)
    assert split is not None
    return split


def _is_restored(split: SplitWeight, weight: Tensor) -> bool:
    return torch.equal(bits_of(decompress(split)), bits_of(weight))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("share", [0.0, 0.01, 1.0])
def test_every_weight_is_restored(shape: tuple[int, int], share: float) -> None:
    weight = with_outliers(normal_weight(*shape), share)
    split = _split(weight)
    assert split.shape == shape
    assert _is_restored(split, weight)


def test_every_bit_pattern_is_restored() -> None:
    """Zeros of both signs, denormals, infinities and NaN with all their payloads."""
    weight = all_bit_patterns()
    assert _is_restored(_split(weight), weight)
    assert _is_restored(_split(weight.t().contiguous()), weight.t())


def test_split_by_pieces_equals_split_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = with_outliers(normal_weight(50, 300), 0.01)
    full = _split(weight)
    monkeypatch.setattr(form, "PIECE_WEIGHTS", 7 * 300)
    pieces = _split(weight)
    for name, plane in full.planes().items():
        assert torch.equal(plane, pieces.planes()[name]), name


def test_code_positions_match_the_docstring() -> None:
    weight = torch.ones(1, 4 * GROUP, dtype=torch.bfloat16)  # exponent 127
    weight[0, 3], weight[0, 3 + GROUP // 2], weight[0, 3 * GROUP + 40] = 2.0, -4.0, 2.0**-100
    split = _split(weight)
    assert split.base.tolist() == [127 - 13]
    assert split.exponents[0, 3].item() == 14 | 15 << 4
    assert split.sign_mantissa[0, 3 + GROUP // 2].item() == 0x80
    assert split.is_wide.tolist() == [[1 << 3]]
    assert split.wide_exponents[0, 8].item() == (27 - 114) % 256 & 0xF0


def test_base_minimises_wide_groups() -> None:
    weight = with_outliers(normal_weight(6, 1024), 0.02)
    exponents = (weight.view(torch.int16) >> 7 & 0xFF).to(torch.uint8)
    groups = form._by_group(exponents, 0).int()
    fewest = []
    for row in groups:
        counts = [
            int(((row < base) | (row > base + 15)).any(-1).sum())
            for base in range(form.LARGEST_BASE + 1)
        ]
        fewest.append(min(counts))
        assert counts[int(form.best_bases(exponents)[len(fewest) - 1])] == fewest[-1]
    assert int(_split(weight).wide_groups().sum()) == sum(fewest) > 0


def test_codes_that_fit_need_no_side_table() -> None:
    weight = torch.rand(64, 512, generator=torch.Generator().manual_seed(0)).bfloat16() + 1
    split = _split(weight)
    assert split.wide_share == 0
    assert split.bits_per_weight == pytest.approx(12, abs=0.2)


def test_sizes_equal_those_of_the_planes() -> None:
    weight = with_outliers(normal_weight(96, 4096), 1e-3)
    split = _split(weight)
    total = sum(plane.numel() * plane.element_size() for plane in split.planes().values())
    assert split.num_bytes == total
    assert split.bits_per_weight == 8 * total / weight.numel()
    num_groups = weight.numel() // GROUP
    assert split.wide_share == len(split.wide_exponents) / num_groups


def test_normal_rows_take_12_bits() -> None:
    split = split_weight(normal_weight(256, 4096))
    assert split is not None
    assert split.bits_per_weight <= 12.07
    assert 0.002 < split.wide_share < 0.007


def test_incompressible_weight_returns_none() -> None:
    assert split_weight(with_outliers(normal_weight(64, 512), 1.0)) is None
    assert split_weight(normal_weight(64, 33)) is None  # padded to a group, it takes 16 bits
    assert split_weight(normal_weight(64, 512).half()) is None
    assert split_weight(normal_weight(0, 512)) is None
    assert split_weight(normal_weight(64, 100)) is not None


def test_invalid_weight_raises() -> None:
    with pytest.raises(BadTensor, match=r"weight has shape \[2, 3, 4\], not \[any, any\]"):
        split_weight(torch.zeros(2, 3, 4, dtype=torch.bfloat16))
    with pytest.raises(BadTensor, match=r"weight is torch.float16, not torch.bfloat16"):
        split_weight(torch.zeros(2, 3).half(), is_always=True)


@pytest.mark.parametrize("parts", [2, 3, 4])
@pytest.mark.parametrize("is_along_k", [False, True])
def test_slice_of_a_split_equals_split_of_the_slice(parts: int, is_along_k: bool) -> None:
    """The cuts of tensor parallelism; the last part along K ends within a group."""
    weight = with_outliers(normal_weight(97, 3 * 4 * GROUP + 17), 2e-3)
    split = _split(weight)
    size = len(weight) // parts if not is_along_k else 12 // parts * GROUP
    for index in range(parts):
        stop = weight.shape[int(is_along_k)] if index == parts - 1 else (index + 1) * size
        bounds = index * size, stop
        part = split.columns(*bounds) if is_along_k else split.rows(*bounds)
        expected = weight[:, slice(*bounds)] if is_along_k else weight[slice(*bounds)]
        assert _is_restored(part, expected.contiguous())
        if not is_along_k:
            for name, plane in _split(expected).planes().items():
                assert torch.equal(plane, part.planes()[name]), name


def test_cut_through_a_group_raises() -> None:
    split = _split(normal_weight(4, 300))
    with pytest.raises(BadTensor, match=r"columns 32 to 256 of 300 cannot be cut off"):
        split.columns(32, 256)
    with pytest.raises(BadTensor, match=r"columns 0 to 200 of 300"):
        split.columns(0, 200)


@pytest.mark.skipif(IS_INTERPRETED, reason="tests/kernels/gpu has this")
def test_ops_multiply_with_a_split_weight() -> None:
    weight = normal_weight(48, 96)
    x, split = normal_weight(5, 96, seed=1), _split(weight)
    y = ops.compressed_linear(x, split, is_batch_invariant=True)
    assert_near(y, x.double() @ weight.double().T)
    assert torch.equal(bits_of(ops.decompress(split)), bits_of(weight))


def test_decompress_writes_into_out() -> None:
    weight = normal_weight(9, 256)
    out = torch.empty_like(weight)
    assert decompress(_split(weight), out) is out
    assert torch.equal(bits_of(out), bits_of(weight))


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5])
def test_select_rows(share: float) -> None:
    weight = with_outliers(normal_weight(40, 64 * 35 + 7), share)
    row_ids = torch.tensor([39, 0, 7, 7])
    found = select_rows(_split(weight), row_ids)
    assert torch.equal(bits_of(found), bits_of(weight[row_ids]))

"""A row's bits do not depend on the other rows: for any number of rows its sums compile to the same
additions in the same order. Only a run on a GPU can verify the hardware.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from kernels.device import IS_INTERPRETED
from kernels.sum_lanes import SumLanes

pytest.importorskip("triton")
if IS_INTERPRETED:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from tests.kernels.support.row_structure import differing, structure
from tests.support.kernels.fake_driver import fake_driver
from tests.support.kernels.split_weights import empty_split

BF16, FP32 = torch.bfloat16, torch.float32
NUM_ROWS = (1, 2, 16, 17, 65, 128, 256)
SLOW = {"decode_attention": (1, 256)}  # compiled for each power of two, 2.5 s each
HIDDEN = (96, 1024, 2048, 4096)
LANES = SumLanes.of(range(0, 4097, 512))


def _empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def _rms_norm(hidden: int, num_rows: int) -> None:
    from kernels.gpu.rows.rms_norm import rms_norm

    rms_norm(_empty(num_rows, hidden), _empty(hidden), 1e-5)


def _add_rms_norm(hidden: int, num_rows: int) -> None:
    from kernels.gpu.rows.add_rms_norm import add_rms_norm

    x = _empty(num_rows, hidden)
    add_rms_norm(x, x, _empty(hidden), 1e-5)


def _gates(num_rows: int) -> None:
    from kernels.gpu.rows.gelu_and_mul import gelu_and_mul
    from kernels.gpu.rows.silu_and_mul import silu_and_mul

    silu_and_mul(_empty(num_rows, 2 * 14336))
    gelu_and_mul(_empty(num_rows, 2 * 9216))


def _rotate_and_store(num_rows: int) -> None:
    from kernels.gpu.kv.rotate_and_store import rotate_and_store

    norms = {"query_norm": _empty(128), "key_norm": _empty(128), "eps": 1e-6}
    angles = _empty(num_rows, 64, dtype=FP32)
    cache, slots = _empty(2, 100, 8, 16, 128), _empty(num_rows, dtype=torch.int64)
    rotate_and_store(_empty(num_rows, 48, 128), angles, angles, cache, slots, **norms)


def _linear(num_rows: int) -> None:
    from kernels.gpu.gemm.linear import linear

    linear(_empty(num_rows, 4096), _empty(4096, 4096), is_batch_invariant=True)


def _per_head_linear(num_rows: int) -> None:
    from kernels.gpu.gemm.per_head_linear import per_head_linear

    per_head_linear(_empty(num_rows, 16, 512), _empty(16, 128, 512))


def _lane_linear(num_rows: int) -> None:
    from kernels.gpu.gemm.lane_linear import lane_linear

    lane_linear(_empty(num_rows, 4096), _empty(4096, 4096), lanes=LANES)


def _compressed_linear(num_rows: int) -> None:
    from kernels.gpu.gemm.compressed_linear import compressed_linear

    compressed_linear(_empty(num_rows, 4096), empty_split(4096, 4096), is_batch_invariant=True)


def _decode_attention(num_rows: int) -> None:
    from kernels.gpu.attention.decode_attention import decode_attention

    cache, lens = _empty(2, 100, 8, 16, 128), _empty(num_rows, dtype=torch.int32)
    tables = _empty(num_rows, 512, dtype=torch.int32)
    query = _empty(num_rows, 64, 128)
    decode_attention(query, cache, tables, lens, 0.1, is_batch_invariant=True)


def _prefill_attention(num_rows: int) -> None:
    from kernels.gpu.attention.prefill_attention import prefill_attention

    cache, lens = _empty(2, 100, 8, 16, 128), _empty(3, dtype=torch.int32)
    tables, starts = _empty(3, 512, dtype=torch.int32), _empty(4, dtype=torch.int32)
    query = _empty(num_rows, 64, 128)
    prefill_attention(query, cache, tables, starts, lens, 0.1, is_batch_invariant=True)


def _sample(num_rows: int) -> None:
    from kernels.gpu.sampling.sample import sample

    floats, integers = _empty(num_rows, dtype=FP32), _empty(num_rows, dtype=torch.int64)
    logits = _empty(num_rows, 128_256, dtype=FP32)
    sample(logits, floats, integers, floats, floats, integers, integers, integers)


def _penalize(num_rows: int) -> None:
    from kernels.gpu.sampling.penalize import penalize

    floats, integers = _empty(50 * num_rows, dtype=FP32), _empty(50 * num_rows, dtype=torch.int64)
    penalize(_empty(num_rows, 128_256, dtype=FP32), integers, integers, floats, floats)


OPS: dict[str, Callable[[int], None]] = {
    **{f"rms_norm of {hidden}": partial(_rms_norm, hidden) for hidden in HIDDEN},
    **{f"add_rms_norm of {hidden}": partial(_add_rms_norm, hidden) for hidden in HIDDEN},
    "gates": _gates,
    "rotate_and_store": _rotate_and_store,
    "linear": _linear,
    "lane_linear": _lane_linear,
    "per_head_linear": _per_head_linear,
    "compressed_linear": _compressed_linear,
    "decode_attention": _decode_attention,
    "prefill_attention": _prefill_attention,
    "sample": _sample,
    "penalize": _penalize,
}


@pytest.mark.parametrize("op", OPS)
def test_sums_do_not_depend_on_the_number_of_rows(op: str) -> None:
    with fake_driver("ttgir") as fake:
        for num_rows in SLOW.get(op, NUM_ROWS):
            OPS[op](num_rows)
    assert fake.compiled
    assert differing(fake.compiled) == {}


def test_prefill_and_decode_attention_add_in_one_order() -> None:
    """A token's bits are the same in a prefill and in a decode step."""
    with fake_driver("ttgir") as fake:
        _decode_attention(17)
        _prefill_attention(300)
    kernels = {each.name: structure(each) for each in fake.compiled}
    assert kernels["_decode_attention_kernel"] == kernels["_prefill_attention_kernel"]


def test_products_of_heads_add_as_the_product_of_one() -> None:
    with fake_driver("ttgir") as fake:
        _linear(1)
        _per_head_linear(1)
    kernels = {each.name: structure(each) for each in fake.compiled}
    assert kernels["_per_head_kernel"] == kernels["_linear_kernel"]


def test_structure_lists_reductions_and_dots() -> None:
    with fake_driver("ttgir") as fake:
        _rms_norm(4096, 2)
        _linear(64)
    found = {each.name: structure(each) for each in fake.compiled}
    warps = "sizePerThread 8, threadsPerWarp 32, warpsPerCTA 4"
    assert f"reduce of 4096 x f32: {warps}" in found["_rms_norm_kernel"]
    dot = "ttng.warp_group_dot of bf16, versionMajor = 3, step 16"
    assert dot in found["_linear_kernel"]

"""Every Triton kernel compiles to machine code for compute capability 8.0, without spilling.

`compiled` has what they compile to for 9.0. A case that has passed is skipped until
the kernels or Triton change; HEARTH_COMPILE_AGAIN=1 runs it (see `tests.kernels.support.passed`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.device import IS_INTERPRETED
from kernels.sum_lanes import SumLanes
from tests.kernels.support.ahead_of_time import MachineCode, compiling
from tests.support.kernels.split_weights import empty_split as _empty_split

pytest.importorskip("triton")
if IS_INTERPRETED:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from tests.kernels.support.passed import is_recorded, record

BF16, FP32 = torch.bfloat16, torch.float32
LATENT_BYTES = 166_912
CAPABILITIES = [pytest.param(80, marks=pytest.mark.long), 90]


def _launch_rms_norm() -> None:
    from kernels.gpu.rows.rms_norm import rms_norm

    rms_norm(_empty(64, 4096), _empty(4096), 1e-5)


def _launch_add_rms_norm() -> None:
    from kernels.gpu.rows.add_rms_norm import add_rms_norm

    x = _empty(64, 4096)
    add_rms_norm(x, x, _empty(4096), 1e-5, has_unit_offset=True)


def _launch_silu_and_mul() -> None:
    from kernels.gpu.rows.silu_and_mul import silu_and_mul

    silu_and_mul(_empty(64, 2 * 14336))


def _launch_clamped_gate() -> None:
    from kernels.gpu.rows.clamped_gate import clamped_gate

    experts = torch.zeros(64, dtype=torch.int64)
    clamped_gate(_empty(64, 2 * 2880), _empty(32, 2 * 2880), experts, limit=7.0, alpha=1.702)


def _launch_gelu_and_mul() -> None:
    from kernels.gpu.rows.gelu_and_mul import gelu_and_mul

    gelu_and_mul(_empty(64, 2 * 9216))


def _launch_rotate_and_store(dtype: torch.dtype = BF16) -> None:
    """Llama 3's heads, and Qwen3's with norms."""
    from kernels.gpu.kv.rotate_and_store import rotate_and_store

    heads, angles = _empty(64, 32 + 8 + 8, 128), _empty(64, 64, dtype=FP32)
    cache, slots = _empty(2, 100, 8, 16, 128, dtype=dtype), _empty(64, dtype=torch.int64)
    scales = None if dtype == BF16 else _empty(2, 8, dtype=FP32)
    rotate_and_store(heads, angles, angles, cache, slots, kv_scales=scales)
    norms = {"query_norm": _empty(128), "key_norm": _empty(128), "eps": 1e-6}
    rotate_and_store(heads, angles, angles, cache, slots, **norms, kv_scales=scales)


def _launch_gather_blocks(dtype: torch.dtype = BF16) -> None:
    from kernels.gpu.kv.gather_blocks import gather_blocks

    _move(gather_blocks, dtype)


def _launch_scatter_blocks(dtype: torch.dtype = BF16) -> None:
    from kernels.gpu.kv.scatter_blocks import scatter_blocks

    _move(scatter_blocks, dtype)


def _move(op: Callable[..., None], dtype: torch.dtype) -> None:
    cache, payload = _empty(2, 2, 9, 8, 16, 128, dtype=dtype), _empty(2, 2, 70, 8, 128, dtype=dtype)
    table = _empty(9, dtype=torch.int64)
    op(cache, table, 5, 70, payload)


def _launch_copy_blocks() -> None:
    from kernels.gpu.kv.copy_blocks import copy_blocks

    cache, ids = _empty(2, 2, 9, 8, 16, 128), _empty(512, dtype=torch.int64)
    for num_copies in (1, 16, 512):
        copy_blocks(cache, ids[:num_copies], ids[:num_copies])


def _launch_linear() -> None:
    from kernels.gpu.gemm.linear import linear

    for num_columns, width in ((4096, 4096), (28672, 4096)):
        weight = _empty(num_columns, width)
        for num_rows in (1, 64, 512):
            for is_batch_invariant in (False, True):
                linear(_empty(num_rows, width), weight, is_batch_invariant=is_batch_invariant)
    linear(_empty(8, 100), _empty(63, 100), _empty(63))


def _launch_lane_linear() -> None:
    from kernels.gpu.gemm.lane_linear import lane_linear

    for width in (4096, 14336):
        for num_rows in (1, 512):
            lanes = SumLanes.of(range(0, width + 1, width // 8))
            lane_linear(_empty(num_rows, width), _empty(4096, width), lanes=lanes)
    lane_linear(_empty(8, 96), _empty(63, 96), _empty(63), lanes=SumLanes.of((0, 32, 96)))


def _launch_per_head_linear() -> None:
    """Values of DeepSeek V3: of one rank of eight, and of all."""
    from kernels.gpu.gemm.per_head_linear import per_head_linear

    for num_heads, counts in ((8, (64,)), (128, (1, 64, 512))):
        for num_rows in counts:
            per_head_linear(_empty(num_rows, num_heads, 512), _empty(num_heads, 128, 512))


def _launch_grouped_linear() -> None:
    """Qwen3-30B-A3B's experts, and lanes of 32 columns."""
    from kernels.gpu.gemm.grouped_linear import grouped_linear, grouped_sums

    offsets, rows = _empty(129, dtype=torch.int64), _empty(512, dtype=torch.int64)
    lanes = SumLanes.of((0, 2048)), SumLanes.of(range(0, 769, 96))
    x, gate_up = _empty(64, 2048), _empty(128 * 1536, 2048)
    grouped_linear(x, rows, offsets, gate_up, lanes=lanes[0])
    x, down = _empty(512, 768), _empty(128 * 2048, 768)
    grouped_linear(x, None, offsets, down, lanes=lanes[1])
    grouped_sums(x, None, offsets, down, lanes=lanes[1], num_sums=8)


def _launch_expert_mlp() -> None:
    """Qwen3-30B-A3B's experts, and an MLP that all tokens share; of few rows, and of many."""
    from kernels.gpu.moe.expert_mlp import by_triton
    from kernels.routing import ExpertRows, ExpertWeights

    experts = _empty(128 * 1536, 2048), _empty(128 * 2048, 768)
    weights = ExpertWeights(*experts, _empty(3072, 2048), _empty(2048, 1536), is_gelu=False)
    for num_tokens in (1, 512):
        tokens, offsets = (_empty(n, dtype=torch.int64) for n in (num_tokens * 8, 129))
        rows = ExpertRows(tokens, offsets, tokens.view(num_tokens, 8))
        by_triton(_empty(num_tokens, 2048), rows, weights)


def _launch_route() -> None:
    """DeepSeek V3's groups of experts, and Qwen3-30B-A3B's one."""
    from kernels.gpu.moe.route import route
    from shared.engine.model_config.moe_config import Routing

    grouped = Routing(score="sigmoid", is_renormalised=True, num_groups=8, top_groups=4, scale=2.5)
    route(_empty(64, 256, dtype=FP32), _empty(256, dtype=FP32), 8, grouped)
    route(_empty(64, 128, dtype=FP32), None, 8, Routing(score="softmax", is_renormalised=True))


def _launch_expert_rows() -> None:
    from kernels.gpu.moe.expert_rows import add_experts, sort_by_expert

    ids, weights = _empty(64, 8, dtype=torch.int64), _empty(64, 8, dtype=FP32)
    sort_by_expert(ids, 128)
    add_experts(_empty(512, 2048), ids, weights, None, 2048)


def _launch_compressed_linear() -> None:
    from kernels.gpu.gemm.compressed_linear import compressed_linear

    for shape in ((4096, 4096), (28672, 4096)):
        for num_rows in (1, 64, 512):
            for is_batch_invariant in (False, True):
                x = _empty(num_rows, shape[1])
                compressed_linear(x, _empty_split(*shape), is_batch_invariant=is_batch_invariant)
    compressed_linear(_empty(8, 100), _empty_split(63, 100), _empty(63))


def _launch_decompress() -> None:
    from kernels.gpu.gemm.decompress import decompress

    decompress(_empty_split(4096, 14336))
    decompress(_empty_split(63, 100))


def _launch_top_k() -> None:
    from kernels.gpu.sampling.top_k import top_k

    top_k(_empty(64, 128_256, dtype=torch.float32), 20)


def _launch_penalize() -> None:
    from kernels.gpu.sampling.penalize import penalize

    floats, integers = _empty(5000, dtype=torch.float32), _empty(5000, dtype=torch.int64)
    penalize(_empty(64, 128_256, dtype=torch.float32), integers, integers, floats, floats)


def _launch_apply_token_mask() -> None:
    from kernels.gpu.sampling.apply_token_mask import apply_token_mask

    rows, words = _empty(64, dtype=torch.int64), _empty(64, 4008, dtype=torch.int32)
    apply_token_mask(_empty(64, 128_256, dtype=torch.float32), rows, words)


def _launch_sample() -> None:
    from kernels.gpu.sampling.sample import sample

    floats, integers = _empty(64, dtype=torch.float32), _empty(64, dtype=torch.int64)
    logits = _empty(64, 128_256, dtype=torch.float32)
    for mask in (None, _empty(64, 4008, dtype=torch.int32)):
        sample(logits, floats, integers, floats, floats, integers, integers, integers, mask)


ATTENTION_OPTIONS: tuple[tuple[int, dict[str, Any]], ...] = (
    (64, {}),
    (64, {"is_batch_invariant": True}),
    (32, {"has_lower": True, "softcap": 50.0}),
)


def _launch_prefill_attention(dtype: torch.dtype = BF16) -> None:
    from kernels.gpu.attention.prefill_attention import prefill_attention

    for num_heads, given in ATTENTION_OPTIONS if dtype == BF16 else ATTENTION_OPTIONS[:1]:
        options = _with_lower(given, 300)
        query, cache, tables, lens, scales = _attention(300, num_heads, 3, dtype)
        starts = _empty(4, dtype=torch.int32)
        prefill_attention(query, cache, tables, starts, lens, 0.1, kv_scales=scales, **options)


def _launch_decode_attention(dtype: torch.dtype = BF16) -> None:
    from kernels.gpu.attention.decode_attention import decode_attention

    for num_heads, given in ATTENTION_OPTIONS if dtype == BF16 else ATTENTION_OPTIONS[:1]:
        options = _with_lower(given, 64)
        query, cache, tables, lens, scales = _attention(64, num_heads, 64, dtype)
        decode_attention(query, cache, tables, lens, 0.1, kv_scales=scales, **options)


def _launch_latent_attention(num_heads: int, cache_dtype: torch.dtype = BF16) -> None:
    """DeepSeek V3 has 128 heads and Kimi K2 64, cut by up to eight ranks."""
    from kernels.gpu.attention.decode_attention import decode_attention
    from kernels.gpu.attention.prefill_attention import prefill_attention
    from kernels.gpu.kv.rotate_and_store_latent import rotate_and_store_latent

    cache, tables = _empty(1, 100, 1, 64, 576), _empty(64, 512, dtype=torch.int32)
    cache = cache.to(cache_dtype)
    scales = None if cache_dtype == BF16 else torch.ones(2, 1)
    lens, starts = _empty(64, dtype=torch.int32), _empty(65, dtype=torch.int32)
    query, latent, angles = _empty(300, num_heads, 576), _empty(300, 576), _empty(300, 32)
    angles, slots = angles.float(), _empty(300, dtype=torch.int64)
    rotate_and_store_latent(
        query[..., 512:],
        latent,
        angles,
        angles,
        cache,
        slots,
        norm=_empty(512),
        eps=1e-6,
        kv_scales=scales,
    )
    for is_batch_invariant in (False, True):
        options = {"value_dim": 512, "is_batch_invariant": is_batch_invariant, "kv_scales": scales}
        prefill_attention(query, cache, tables, starts, lens, 0.1, **options)
        decode_attention(query[:64], cache, tables, lens, 0.1, **options)


def _with_lower(options: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    if "has_lower" not in options:
        return options
    return {"softcap": options["softcap"], "lower": _empty(num_tokens, dtype=torch.int32)}


def _attention(
    num_tokens: int, num_heads: int, num_seqs: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """query, kv_cache, block_tables, context_lens, kv_scales"""
    return (
        _empty(num_tokens, num_heads, 128),
        _empty(2, 100, 8, 16, 128, dtype=dtype),
        _empty(num_seqs, 512, dtype=torch.int32),
        _empty(num_seqs, dtype=torch.int32),
        None if dtype == BF16 else _empty(2, 8, dtype=FP32),
    )


LAUNCHES: dict[str, Callable[[], None]] = {
    "add_rms_norm": _launch_add_rms_norm,
    "grouped_linear": _launch_grouped_linear,
    "expert_mlp": _launch_expert_mlp,
    "expert_rows": _launch_expert_rows,
    "route": _launch_route,
    "lane_linear": _launch_lane_linear,
    "compressed_linear": _launch_compressed_linear,
    "clamped_gate": _launch_clamped_gate,
    "copy_blocks": _launch_copy_blocks,
    "decode_attention": _launch_decode_attention,
    "decompress": _launch_decompress,
    "gather_blocks": _launch_gather_blocks,
    "gelu_and_mul": _launch_gelu_and_mul,
    "top_k": _launch_top_k,
    "linear": _launch_linear,
    "penalize": _launch_penalize,
    "per_head_linear": _launch_per_head_linear,
    "apply_token_mask": _launch_apply_token_mask,
    "sample": _launch_sample,
    "prefill_attention": _launch_prefill_attention,
    "rms_norm": _launch_rms_norm,
    "rotate_and_store": _launch_rotate_and_store,
    "scatter_blocks": _launch_scatter_blocks,
    "silu_and_mul": _launch_silu_and_mul,
}
FP8_LAUNCHES: dict[str, Callable[[torch.dtype], None]] = {
    "decode_attention": _launch_decode_attention,
    "prefill_attention": _launch_prefill_attention,
    "rotate_and_store": _launch_rotate_and_store,
}


@contextmanager
def compiling_once(request: pytest.FixtureRequest, capability: int) -> Iterator[list[MachineCode]]:
    """Skips a case that has passed; records this one if its block completes."""
    case = request.node.nodeid
    if is_recorded(case):
        pytest.skip("compiled before, from the same sources")
    with compiling(capability) as found:
        yield found
    record(case)


@pytest.mark.long
@pytest.mark.parametrize("op", LAUNCHES)
def test_compiles_without_spilling(request: pytest.FixtureRequest, op: str) -> None:
    with compiling_once(request, 80) as found:
        LAUNCHES[op]()
        assert found
        assert [each for each in found if each.num_spilled_bytes] == []


@pytest.mark.long
@pytest.mark.parametrize("num_heads", (8, 16, 64, 128))
def test_compiles_for_latents(request: pytest.FixtureRequest, num_heads: int) -> None:
    """Sums of 64 x 512 take half of the registers; some values spill, as with heads of 256."""
    with compiling_once(request, 80) as found:
        _launch_latent_attention(num_heads)
        assert 0 < max(each.shared_bytes for each in found) <= LATENT_BYTES


@pytest.mark.long
@pytest.mark.parametrize("num_heads", [128, 8])
def test_compiles_for_latents_in_fp8(request: pytest.FixtureRequest, num_heads: int) -> None:
    """The tile of BF16 that both products read takes what the shorter stages leave."""
    with compiling_once(request, 90) as found:
        _launch_latent_attention(num_heads, torch.float8_e4m3fn)
        assert 0 < max(each.shared_bytes for each in found) <= 204_800


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    ("num_rows", "is_batch_invariant"),
    [
        *[(1, True), (64, False)],
        *(pytest.param(*case, marks=pytest.mark.long) for case in [(1, False), (64, True)]),
    ],
)
def test_split_and_dense_weights_use_equal_dot_layouts(
    request: pytest.FixtureRequest, num_rows: int, is_batch_invariant: bool, capability: int
) -> None:
    """Uses the same instructions and operand layouts; otherwise sums would round differently."""
    from kernels.gpu.gemm.compressed_linear import compressed_linear
    from kernels.gpu.gemm.linear import linear

    x = _empty(num_rows, 4096)
    with compiling_once(request, capability) as found:
        linear(x, _empty(4096, 4096), is_batch_invariant=is_batch_invariant)
        compressed_linear(x, _empty_split(4096, 4096), is_batch_invariant=is_batch_invariant)
        by_kernel = {each.name: each.dot_layouts for each in found}
        assert by_kernel["_linear_kernel"]
        assert by_kernel["_compressed_linear_kernel"] == by_kernel["_linear_kernel"]


def _empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype)

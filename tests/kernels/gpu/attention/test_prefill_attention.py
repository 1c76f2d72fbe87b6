from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.check_tensor import BadTensor
from kernels.device import IS_INTERPRETED
from kernels.gpu.attention.prefill_attention import prefill_attention
from kernels.reference.prefill_attention import prefill_attention as reference
from shared.kv_layout import Chunk, Reach, Window
from tests.kernels.support.lower import lower_of
from tests.support.kernels.contexts import Paged, paged
from tests.support.kernels.inputs import poisoned_outputs, random
from tests.support.kernels.tolerance import assert_near

# (query_len, context_len): full prompts, chunks, single tokens, no new tokens, empty contexts
CHUNKS = [(63, 63), (0, 0), (1, 100), (37, 130), (0, 30), (1, 1), (0, 0)]
if not IS_INTERPRETED:
    CHUNKS += [(1000, 1000), (100, 3000), (7, 8191), (4097, 5000)]


def _query(num_tokens: int, paged: Paged, num_heads: int, dtype: torch.dtype) -> Tensor:
    return random(
        num_tokens, num_heads, paged.cache.shape[-1], like=paged.cache.device, dtype=dtype
    )


def _starts(query_lens: list[int], like: Tensor) -> Tensor:
    return torch.tensor([0, *query_lens]).cumsum(0).to(like)


def _check(
    group: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    index_dtype: torch.dtype = torch.int64,
    num_kv_heads: int = 2,
    reach: Reach = None,
    **options: Any,
) -> None:
    context = paged(
        [context_len for _, context_len in CHUNKS],
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        device=device,
        index_dtype=index_dtype,
    )
    query_lens = [query_len for query_len, _ in CHUNKS]
    query = _query(sum(query_lens), context, num_kv_heads * group, dtype)
    starts = _starts(query_lens, context.tables)
    rest = (context.tables, starts, context.context_lens, head_dim**-0.5)
    options["lower"] = lower_of(reach, *zip(*CHUNKS, strict=True), device)
    with poisoned_outputs():
        out = prefill_attention(query, context.cache, *rest, **options)
    assert out.dtype == dtype
    assert_near(out, reference(query.float(), context.cache.float(), *rest, **options))


@pytest.mark.parametrize(
    ("group", "head_dim", "block_size"),
    [
        *[(3, 20, 4), (7, 96, 64), (4, 256, 32), (1, 64, 16)],
        pytest.param(4, 80, 32, marks=pytest.mark.long),
        pytest.param(8, 128, 16, marks=pytest.mark.long),
    ],
)
def test_shapes(
    group: int, head_dim: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    _check(group, head_dim, block_size, dtype, device)


@pytest.mark.parametrize("is_batch_invariant", [False, True])
@pytest.mark.parametrize("softcap", [1.5, None])
@pytest.mark.parametrize("reach", [Window(63), Chunk(16), None, Window(1), Window(100)])
def test_reaches_and_capped_scores(
    reach: Reach,
    softcap: float | None,
    is_batch_invariant: bool,
    device: torch.device,
    small_segments: None,
) -> None:
    dtype = torch.float32 if IS_INTERPRETED else torch.bfloat16
    options: dict[str, Any] = {
        "reach": reach,
        "softcap": softcap,
        "is_batch_invariant": is_batch_invariant,
    }
    _check(4, 64, 16, dtype, device, index_dtype=torch.int32, num_kv_heads=1, **options)


@pytest.mark.parametrize("is_batch_invariant", [False, True])
@pytest.mark.parametrize("reach", [None, Window(40)])
def test_sinks(
    reach: Reach, is_batch_invariant: bool, device: torch.device, small_segments: None
) -> None:
    """Contexts are split, and a sink counts once; one of them is above all scores."""
    dtype = torch.float32 if IS_INTERPRETED else torch.bfloat16
    sinks = torch.tensor([-4.0, 0.5, 4.0, 90.0, 1.0, -90.0], device=device)
    options: dict[str, Any] = {"reach": reach, "is_batch_invariant": is_batch_invariant}
    _check(3, 64, 16, dtype, device, sinks=sinks, **options)


@pytest.mark.parametrize("reach", [Window(40), Chunk(70), Window(150), Chunk(16)])
def test_blocks_before_the_reach_are_not_read(reach: Window | Chunk, device: torch.device) -> None:
    """These blocks may belong to other sequences by now."""
    query_lens, lens = [50, 1], [300, 200]
    dtype = torch.float32 if IS_INTERPRETED else torch.bfloat16
    full = paged(lens, num_kv_heads=1, head_dim=64, block_size=16, dtype=dtype, device=device)
    rest = full.without([reach.first_seen(lens[seq] - query_lens[seq]) for seq in (0, 1)])
    query, starts = _query(51, full, 4, dtype), _starts(query_lens, full.tables)
    lower = lower_of(reach, query_lens, lens, device)
    out, expected = (
        prefill_attention(
            query, each.cache, each.tables, starts, each.context_lens, 0.125, lower=lower
        )
        for each in (rest, full)
    )
    assert torch.equal(out, expected)


def test_fp8_cache_with_scales(dtype: torch.dtype, device: torch.device) -> None:
    context = paged(
        [63, 100],
        **{"num_kv_heads": 2, "head_dim": 64, "block_size": 16},
        **{"dtype": torch.float8_e4m3fn, "device": device},
    )
    scales = torch.tensor([[0.5, 0.25], [2.0, 3.0]], device=device)
    query = _query(40, context, 8, dtype)
    starts = _starts([30, 10], context.tables)
    rest = (context.tables, starts, context.context_lens, 0.125)
    with poisoned_outputs():
        out = prefill_attention(query, context.cache, *rest, kv_scales=scales)
    wide = context.cache.float() * scales[:, None, :, None, None]
    assert_near(out, reference(query.float(), wide, *rest))
    assert_near(out, reference(query.float(), context.cache, *rest, kv_scales=scales))


def test_queries_within_a_fused_projection(dtype: torch.dtype, device: torch.device) -> None:
    context = paged([30], num_kv_heads=1, head_dim=64, block_size=16, dtype=dtype, device=device)
    query = _query(21, context, 6, dtype)[:, 1:5]
    starts = _starts([21], context.tables)
    rest = (context.cache, context.tables, starts, context.context_lens, 0.125)
    assert torch.equal(
        prefill_attention(query, *rest), prefill_attention(query.contiguous(), *rest)
    )


@pytest.mark.parametrize("reach", [None, Window(70), Chunk(48)])
def test_bits_depend_neither_on_chunks_nor_on_the_batch(
    reach: Reach, dtype: torch.dtype, device: torch.device, small_segments: None
) -> None:
    lens = [150, 33, 10] if IS_INTERPRETED else [3000, 33, 1025, 64, 1, 77, 500]
    context = paged(lens, num_kv_heads=1, head_dim=64, block_size=16, dtype=dtype, device=device)
    queries = [_query(length, context, 4, dtype) for length in lens]

    def prefill(query: Tensor, query_lens: list[int], context: Paged) -> Tensor:
        return prefill_attention(
            query,
            context.cache,
            context.tables,
            _starts(query_lens, context.tables),
            context.context_lens,
            0.125,
            lower=lower_of(reach, query_lens, context.context_lens.tolist(), device),
            is_batch_invariant=True,
        )

    together = prefill(torch.cat(queries), lens, context)
    alone = prefill(queries[0], lens[:1], context.rows([0]))
    assert torch.equal(alone, together[: lens[0]])
    for size in (1, 7, 64):
        last = slice(lens[0] - lens[0] % size - 2 * size, lens[0] - lens[0] % size)
        for cut in range(last.start, last.stop, size):
            part = prefill(
                queries[0][cut : cut + size], [size], context.rows([0]).up_to([cut + size])
            )
            assert torch.equal(part, alone[cut : cut + size])


def test_no_rows(device: torch.device) -> None:
    context = paged(
        [0], num_kv_heads=1, head_dim=16, block_size=16, dtype=torch.float32, device=device
    )
    query = torch.empty(0, 2, 16, device=device)
    starts = _starts([0], context.tables)
    rest = (context.cache, context.tables, starts, context.context_lens, 1.0)
    assert prefill_attention(query, *rest).shape == (0, 2, 16)


def test_invalid_arguments_raise(device: torch.device) -> None:
    context = paged(
        [5], num_kv_heads=2, head_dim=16, block_size=16, dtype=torch.float32, device=device
    )
    query, starts = torch.ones(3, 4, 16, device=device), _starts([3], context.tables)
    cache, tables, lens = context.cache, context.tables, context.context_lens

    def fails(match: str, *args: Any, **options: Any) -> None:
        with pytest.raises(BadTensor, match=match):
            prefill_attention(*args, 1.0, **options)

    fails("cu_seqlens_q has shape", query, cache, tables, starts[:1], lens)
    fails("cu_seqlens_q is torch.float32", query, cache, tables, starts.float(), lens)
    fails("block_tables has shape", query, cache, tables[:0], starts, lens)
    fails("kv_cache is torch.float16, not", query, cache.half(), tables, starts, lens)
    fails("kv_cache has shape", query, cache[0], tables, starts, lens)
    fails(r"kv_cache\[0\] is not contiguous", query, cache[:, :, :, ::2], tables, starts, lens)
    fails("query has 3 heads for 2 KV heads", query[:, :3], cache, tables, starts, lens)
    scales = torch.ones(2, 3, device=device)
    fails("kv_scales has shape", query, cache, tables, starts, lens, kv_scales=scales)
    sinks = torch.ones(5, device=device)
    fails("sinks has shape", query, cache, tables, starts, lens, sinks=sinks)
    fails("sinks is torch.float16", query, cache, tables, starts, lens, sinks=sinks[:4].half())

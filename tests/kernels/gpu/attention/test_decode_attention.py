from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.check_tensor import BadTensor
from kernels.device import IS_INTERPRETED
from kernels.gpu.attention.decode_attention import decode_attention
from kernels.gpu.attention.prefill_attention import prefill_attention
from kernels.reference.decode_attention import decode_attention as reference
from shared.kv_layout import Chunk, Reach, Window
from tests.kernels.support.lower import lower_of
from tests.support.kernels.contexts import Paged, paged
from tests.support.kernels.inputs import poisoned_outputs, random
from tests.support.kernels.tolerance import assert_near

LENS = [63, 0, 1, 150, 100]
if not IS_INTERPRETED:
    LENS += [8191, 1024, 30_000, 1025]


def _query(paged: Paged, num_heads: int, dtype: torch.dtype) -> Tensor:
    num_seqs, head_dim = len(paged.tables), paged.cache.shape[-1]
    return random(num_seqs, num_heads, head_dim, like=paged.cache.device, dtype=dtype)


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
        LENS,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        device=device,
        index_dtype=index_dtype,
    )
    query = _query(context, num_kv_heads * group, dtype)
    rest = (context.tables, context.context_lens, head_dim**-0.5)
    options["lower"] = lower_of(reach, [1] * len(LENS), LENS, device)
    with poisoned_outputs():
        out = decode_attention(query, context.cache, *rest, **options)
    assert out.dtype == dtype
    assert_near(out, reference(query.float(), context.cache.float(), *rest, **options))
    assert not out[1].any()  # of a sequence without tokens


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


@pytest.mark.parametrize("num_processors", [1, 7, 132])
def test_any_number_of_processors(
    num_processors: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "kernels.gpu.attention.decode_attention.num_processors"
    monkeypatch.setattr(name, lambda _: num_processors)
    _check(2, 16, 16, torch.float32, device, num_kv_heads=1)


@pytest.mark.parametrize("reach", [Window(40), Chunk(70), Window(150), Chunk(16)])
def test_blocks_before_the_reach_are_not_read(reach: Window | Chunk, device: torch.device) -> None:
    """These blocks may belong to other sequences by now."""
    lens = [200, 170, 30]
    dtype = torch.float32 if IS_INTERPRETED else torch.bfloat16
    full = paged(lens, num_kv_heads=1, head_dim=64, block_size=16, dtype=dtype, device=device)
    rest = full.without([reach.first_seen(length - 1) for length in lens])
    query = _query(full, 4, dtype)
    lower = lower_of(reach, [1] * len(lens), lens, device)
    out, expected = (
        decode_attention(query, each.cache, each.tables, each.context_lens, 0.125, lower=lower)
        for each in (rest, full)
    )
    assert torch.equal(out, expected)


def test_fp8_cache_with_scales(dtype: torch.dtype, device: torch.device) -> None:
    context = paged(
        [63, 200],
        **{"num_kv_heads": 2, "head_dim": 64, "block_size": 16},
        **{"dtype": torch.float8_e4m3fn, "device": device},
    )
    scales = torch.tensor([[0.5, 0.25], [2.0, 3.0]], device=device)
    query = _query(context, 8, dtype)
    rest = (context.tables, context.context_lens, 0.125)
    with poisoned_outputs():
        out = decode_attention(query, context.cache, *rest, kv_scales=scales)
    wide = context.cache.float() * scales[:, None, :, None, None]
    assert_near(out, reference(query.float(), wide, *rest))


@pytest.mark.parametrize(
    ("group", "head_dim", "reach", "has_sinks"),
    [
        *[(7, 64, None, False), (1, 80, Window(70), True), (1, 80, Chunk(48), False)],
        pytest.param(8, 128, None, True, marks=pytest.mark.long),
    ],
)
def test_bits_depend_neither_on_the_batch_nor_on_chunks(
    group: int,
    head_dim: int,
    reach: Reach,
    has_sinks: bool,
    dtype: torch.dtype,
    device: torch.device,
    small_segments: None,
) -> None:
    """A token's row is the same alone, with six others, and at the end of a prefill."""
    lens = [200, 1, 128, 33, 129, 0, 77]
    if not IS_INTERPRETED:
        lens += [5000, 1024, 1025]
    context = paged(
        lens, num_kv_heads=1, head_dim=head_dim, block_size=16, dtype=dtype, device=device
    )
    query = _query(context, group, dtype)
    options: dict[str, Any] = {"is_batch_invariant": True}
    if has_sinks:
        options["sinks"] = random(group, like=device, dtype=torch.float32, seed=3)

    def lower(query_len: int, *lens: int) -> Tensor | None:
        return lower_of(reach, [query_len] * len(lens), lens, device)

    scale = head_dim**-0.5
    together = decode_attention(
        query,
        context.cache,
        context.tables,
        context.context_lens,
        scale,
        **options,
        lower=lower(1, *lens),
    )
    for seq in (0, 2, len(lens) - 1):
        one = context.rows([seq])
        alone = decode_attention(
            query[seq : seq + 1],
            one.cache,
            one.tables,
            one.context_lens,
            scale,
            **options,
            lower=lower(1, lens[seq]),
        )
        assert torch.equal(alone[0], together[seq])
        before = random(12, group, head_dim, like=device, dtype=dtype, seed=5)
        prefilled = prefill_attention(
            torch.cat((before, query[seq : seq + 1])),
            one.cache,
            one.tables,
            torch.tensor([0, 13], device=device),
            one.context_lens,
            scale,
            **options,
            lower=lower(13, lens[seq]),
        )
        assert torch.equal(prefilled[12], together[seq])


def test_no_rows(device: torch.device) -> None:
    context = paged(
        [0], num_kv_heads=1, head_dim=16, block_size=16, dtype=torch.float32, device=device
    ).rows([])
    query = torch.empty(0, 2, 16, device=device)
    rest = (context.cache, context.tables, context.context_lens, 1.0)
    assert decode_attention(query, *rest).shape == (0, 2, 16)


def test_invalid_arguments_raise(device: torch.device) -> None:
    context = paged(
        [5], num_kv_heads=2, head_dim=16, block_size=16, dtype=torch.float32, device=device
    )
    query = torch.ones(1, 4, 16, device=device)
    cache, tables, lens = context.cache, context.tables, context.context_lens
    with pytest.raises(BadTensor, match=r"context_lens has shape \[1\], not \[2\]"):
        decode_attention(query.expand(2, -1, -1), cache, tables, lens, 1.0)
    with pytest.raises(BadTensor, match=r"context_lens is torch.float32, not torch.int64 or"):
        decode_attention(query, cache, tables, lens.float(), 1.0)
    with pytest.raises(BadTensor, match=r"query has head_dim 272, more than 256"):
        wide = torch.ones(2, 1, 2, 16, 272, device=device)
        decode_attention(torch.ones(1, 4, 272, device=device), wide, tables, lens, 1.0)
    with pytest.raises(ValueError, match=r"scale is 0.0, not positive"):
        decode_attention(query, cache, tables, lens, 0.0)

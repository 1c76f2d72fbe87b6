"""Attention, compared with the reference in FP32 on the same device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.gpu.attention import decode_attention as decoding
from kernels.gpu.attention import prefill_attention as prefilling
from kernels.reference.decode_attention import decode_attention as reference_decode
from kernels.reference.prefill_attention import prefill_attention as reference_prefill
from tests.support.kernels.cases.case import Inputs, Result, Results, cases
from tests.support.kernels.contexts import Paged

SOFTCAP = 50.0
FP8 = torch.float8_e4m3fn


def decode_attention(inputs: Inputs, contexts: str, is_exact: bool) -> Results:
    lens = inputs.sizes.contexts[contexts]
    return _decode(inputs, lens, is_batch_invariant=is_exact)


def decode_attention_of_more_heads(inputs: Inputs, is_exact: bool) -> Results:
    heads = inputs.sizes.more_heads
    return _decode(inputs, inputs.sizes.contexts["batch"], heads=heads, is_batch_invariant=is_exact)


def decode_attention_in_window(inputs: Inputs, is_exact: bool) -> Results:
    """Decodes within a sliding window, with capped scores, as in Gemma 2."""
    lens = inputs.sizes.contexts["batch"]
    lower = inputs.integers([max(0, each - inputs.sizes.window) for each in lens])
    return _decode(inputs, lens, lower=lower, softcap=SOFTCAP, is_batch_invariant=is_exact)


def decode_attention_with_sinks(inputs: Inputs, is_exact: bool) -> Results:
    """Decodes within a sliding window, as in gpt-oss."""
    lens = inputs.sizes.contexts["batch"]
    lower = inputs.integers([max(0, each - inputs.sizes.window) for each in lens])
    sinks = inputs.random(inputs.sizes.heads, dtype=torch.float32, seed=5)
    return _decode(inputs, lens, lower=lower, sinks=sinks, is_batch_invariant=is_exact)


def decode_attention_fp8(inputs: Inputs, is_exact: bool) -> Results:
    options = {"heads": inputs.sizes.more_heads, "cache_dtype": FP8}
    return _decode(inputs, inputs.sizes.contexts["batch"], **options, is_batch_invariant=is_exact)


def _decode(
    inputs: Inputs,
    lens: list[int],
    *,
    heads: int | None = None,
    cache_dtype: torch.dtype | None = None,
    **options: Any,
) -> Results:
    paged, scales = _paged(inputs, lens, cache_dtype)
    query = inputs.random(len(lens), heads or inputs.sizes.heads, inputs.sizes.head_dim)
    rest = paged.tables, paged.context_lens, inputs.sizes.head_dim**-0.5
    out = decoding.decode_attention(query, paged.cache, *rest, kv_scales=scales, **options)

    def wanted() -> Tensor:
        return reference_decode(query.float(), _scaled(paged.cache, scales), *rest, **options)

    return (Result(out, wanted),)


def prefill_attention(inputs: Inputs, is_exact: bool) -> Results:
    return _prefill(inputs, is_batch_invariant=is_exact)


def prefill_attention_of_more_heads(inputs: Inputs, is_exact: bool) -> Results:
    return _prefill(inputs, heads=inputs.sizes.more_heads, is_batch_invariant=is_exact)


def prefill_attention_in_window(inputs: Inputs, is_exact: bool) -> Results:
    new = (range(context - length, context) for length, context in inputs.sizes.runs)
    positions = [position for run in new for position in run]
    lower = inputs.integers([max(0, each + 1 - inputs.sizes.window) for each in positions])
    return _prefill(inputs, lower=lower, softcap=SOFTCAP, is_batch_invariant=is_exact)


def prefill_attention_with_sinks(inputs: Inputs, is_exact: bool) -> Results:
    sinks = inputs.random(inputs.sizes.heads, dtype=torch.float32, seed=5)
    return _prefill(inputs, sinks=sinks, is_batch_invariant=is_exact)


def prefill_attention_fp8(inputs: Inputs, is_exact: bool) -> Results:
    options = {"heads": inputs.sizes.more_heads, "cache_dtype": FP8}
    return _prefill(inputs, **options, is_batch_invariant=is_exact)


def _prefill(
    inputs: Inputs,
    *,
    heads: int | None = None,
    cache_dtype: torch.dtype | None = None,
    **options: Any,
) -> Results:
    query_lens, lens = zip(*inputs.sizes.runs, strict=True)
    paged, scales = _paged(inputs, lens, cache_dtype)
    num_heads = heads or inputs.sizes.heads
    query = inputs.random(sum(query_lens), num_heads, inputs.sizes.head_dim)
    rest = paged.tables, starts_of(inputs, query_lens), paged.context_lens
    scale = inputs.sizes.head_dim**-0.5
    out = prefilling.prefill_attention(
        query, paged.cache, *rest, scale, kv_scales=scales, **options
    )

    def wanted() -> Tensor:
        wide = _scaled(paged.cache, scales)
        return reference_prefill(query.float(), wide, *rest, scale, **options)

    return (Result(out, wanted),)


def latent_attention(inputs: Inputs, heads: str, is_exact: bool) -> Results:
    """Decode and prefill of values that are the first elements of their keys."""
    latent, lens = inputs.sizes.latent, inputs.sizes.contexts["latents"]
    head_dim, num_heads = latent["width"] + latent["rope"], latent["heads"][heads]
    shape = {"num_kv_heads": 1, "head_dim": head_dim, "block_size": latent["block_size"]}
    paged, scale = inputs.paged(lens, **shape), head_dim**-0.5
    cache, tables, context_lens = paged.cache[:1], paged.tables, paged.context_lens
    options = {"value_dim": latent["width"], "is_batch_invariant": is_exact}
    query = inputs.random(len(lens), num_heads, head_dim)
    out = decoding.decode_attention(query, cache, tables, context_lens, scale, **options)
    query_lens = [min(each, 20) for each in lens]
    long_query = inputs.random(sum(query_lens), num_heads, head_dim, seed=1)
    rest = tables, starts_of(inputs, query_lens), context_lens, scale
    long_out = prefilling.prefill_attention(long_query, cache, *rest, **options)
    one = tables, context_lens, scale
    return (
        Result(out, lambda: reference_decode(query.float(), cache.float(), *one, **options)),
        Result(
            long_out,
            lambda: reference_prefill(long_query.float(), cache.float(), *rest, **options),
        ),
    )


def starts_of(inputs: Inputs, query_lens: list[int] | tuple[int, ...]) -> Tensor:
    return inputs.integers([sum(query_lens[:each]) for each in range(len(query_lens) + 1)])


def _paged(
    inputs: Inputs, lens: list[int] | tuple[int, ...], cache_dtype: torch.dtype | None
) -> tuple[Paged, Tensor | None]:
    """Returns a paged cache, and the scales of one in FP8."""
    sizes = inputs.sizes
    shape = {"num_kv_heads": sizes.kv_heads, "head_dim": sizes.head_dim}
    paged = inputs.paged(lens, **shape, block_size=sizes.block_size, dtype=cache_dtype)
    if cache_dtype is None:
        return paged, None
    return paged, inputs.random(2, sizes.kv_heads, dtype=torch.float32, seed=4).abs() + 0.1


def _scaled(cache: Tensor, scales: Tensor | None) -> Tensor:
    wide = cache.float()
    return wide if scales is None else wide * scales[:, None, :, None, None]


BOTH = (True, False)
LATENT_KERNELS = ("decode_attention", "prefill_attention")
CASES = [
    *cases(decode_attention, contexts=("batch", "one"), is_exact=BOTH),
    *cases(decode_attention_of_more_heads, op="decode_attention", is_exact=BOTH),
    *cases(decode_attention_in_window, op="decode_attention", is_exact=BOTH),
    *cases(decode_attention_with_sinks, op="decode_attention", is_exact=BOTH),
    *cases(decode_attention_fp8, op="decode_attention", is_exact=BOTH),
    *cases(prefill_attention, is_exact=BOTH),
    *cases(prefill_attention_of_more_heads, op="prefill_attention", is_exact=BOTH),
    *cases(prefill_attention_in_window, op="prefill_attention", is_exact=BOTH),
    *cases(prefill_attention_with_sinks, op="prefill_attention", is_exact=BOTH),
    *cases(prefill_attention_fp8, op="prefill_attention", is_exact=BOTH),
    *cases(
        latent_attention,
        kernels=LATENT_KERNELS,
        heads=("rank", "sixteen", "half", "all"),
        is_exact=BOTH,
    ),
]

"""Products. A reference is the library's product in FP32."""

from __future__ import annotations

from functools import partial
from itertools import pairwise, starmap

import torch
from torch import Tensor

from kernels.gpu.gemm import compressed_linear as compressed
from kernels.gpu.gemm import decompress as decompressing
from kernels.gpu.gemm import grouped_linear as grouped
from kernels.gpu.gemm import lane_linear as laned
from kernels.gpu.gemm import linear as dense
from kernels.gpu.gemm import per_head_linear as by_head
from kernels.routing import ExpertRows
from kernels.split_weight import SplitWeight, split_weight
from kernels.sum_lanes import SumLanes, add_lanes
from kernels.torch_ops.expert_rows import sort_by_expert
from tests.support.kernels.cases.case import Inputs, Result, Results, cases
from tests.support.kernels.cases.sizes import MIXTRAL, QWEN3, Mixture
from tests.support.kernels.split_weights import empty_split
from tests.support.kernels.tolerance import assert_equal, assert_same_bits

NUM_LANES = 8
assert_sums = partial(torch.testing.assert_close, rtol=1e-3, atol=1e-3)  # FP32, in another order


def product_of(x: Tensor, weight: Tensor) -> Tensor:
    return x.float() @ weight.float().T


def operands(inputs: Inputs, weight: str, rows: str) -> tuple[Tensor, Tensor]:
    shape = inputs.sizes.weights[weight]
    return inputs.random(inputs.sizes.rows[rows], shape[1]), inputs.weight(shape)


def even_lanes(width: int, num: int = NUM_LANES) -> SumLanes:
    return SumLanes.of(range(0, width + 1, width // num))


def linear(inputs: Inputs, weight: str, rows: str, is_exact: bool) -> Results:
    x, dense_weight = operands(inputs, weight, rows)
    y = dense.linear(x, dense_weight, is_batch_invariant=is_exact)
    return (Result(y, lambda: product_of(x, dense_weight)),)


def linear_with_bias(inputs: Inputs, rows: str, is_exact: bool) -> Results:
    x, dense_weight = operands(inputs, "odd", rows)
    bias = inputs.random(len(dense_weight), seed=2)
    y = dense.linear(x, dense_weight, bias, is_batch_invariant=is_exact)
    return (Result(y, lambda: product_of(x, dense_weight) + bias.float()),)


def lane_linear(inputs: Inputs, weight: str, rows: str) -> Results:
    x, dense_weight = operands(inputs, weight, rows)
    lanes = even_lanes(x.shape[1])
    y = laned.lane_linear(x, dense_weight, lanes=lanes)
    sums = laned.lane_sums(x, dense_weight, lanes=lanes, num_sums=NUM_LANES)

    def wanted_sums() -> Tensor:
        parts = [(x[:, each], dense_weight[:, each]) for each in starmap(slice, lanes.ranges)]
        return torch.stack([product_of(*part) for part in parts])

    return (
        Result(y, lambda: product_of(x, dense_weight)),
        Result(sums, wanted_sums, assert_sums),
        Result(y, lambda: add_lanes(sums)[0].to(y.dtype), assert_equal),
    )


def lane_linear_with_bias(inputs: Inputs, rows: str) -> Results:
    """Lanes of unequal widths."""
    x, dense_weight = operands(inputs, "narrow", rows)
    bias = inputs.random(len(dense_weight), seed=2)
    y = laned.lane_linear(x, dense_weight, bias, lanes=SumLanes.of((0, 32, 96)))
    return (Result(y, lambda: product_of(x, dense_weight) + bias.float()),)


def per_head_linear(inputs: Inputs, heads: str, rows: str) -> Results:
    """Returns the expansion of latents to values."""
    num, width = inputs.sizes.latent["heads"][heads], inputs.sizes.latent["width"]
    x = inputs.random(inputs.sizes.rows[rows], num, width)
    weight = inputs.weight((num * inputs.sizes.head_dim, width)).unflatten(0, (num, -1))
    y = by_head.per_head_linear(x, weight)
    return (Result(y, lambda: torch.einsum("thk,hnk->thn", x.float(), weight.float())),)


def grouped_linear(inputs: Inputs, mixture: str, weight: str, rows: str) -> Results:
    """Gate and up: rows that are chosen from all tokens, one lane. Down: rows by expert."""
    own, num_tokens = inputs.sizes.mixtures[mixture], inputs.sizes.rows[rows]
    num_columns, width = own.weight_shape(weight)
    chosen = expert_rows(inputs, own, num_tokens)
    all_weights = inputs.weight((own.num_experts * num_columns, width))
    is_first = weight == "gate_up"
    lanes = even_lanes(width, 1 if is_first else NUM_LANES)
    tokens = chosen.tokens if is_first else None
    x = inputs.random(num_tokens if is_first else len(chosen.tokens), width)
    y = grouped.grouped_linear(x, tokens, chosen.offsets, all_weights, lanes=lanes)
    options = {"lanes": lanes, "num_sums": lanes.num}
    sums = grouped.grouped_sums(x, tokens, chosen.offsets, all_weights, **options)

    def wanted() -> Tensor:
        by_expert = x if tokens is None else x.index_select(0, tokens)
        bounds, experts = (
            pairwise(chosen.offsets.tolist()),
            all_weights.unflatten(0, (-1, num_columns)),
        )
        parts = zip(experts, bounds, strict=True)
        return torch.cat([product_of(by_expert[first:end], each) for each, (first, end) in parts])

    return (
        Result(y, wanted),
        Result(y, lambda: add_lanes(sums)[0].to(y.dtype), assert_equal),
    )


def expert_rows(inputs: Inputs, mixture: Mixture, num_tokens: int) -> ExpertRows:
    """Returns the rows of random experts of each token."""
    num_experts, num_chosen = mixture.num_experts, mixture.num_chosen
    if not inputs.is_computed:
        empty = inputs.random(num_tokens * num_chosen, dtype=torch.int64)
        return ExpertRows(empty, inputs.random(num_experts + 1, dtype=torch.int64), empty)
    scores = inputs.random(num_tokens, num_experts, dtype=torch.float32, seed=3)
    return sort_by_expert(scores.topk(num_chosen).indices.sort(dim=1).values, num_experts)


def compressed_linear(inputs: Inputs, weight: str, rows: str, is_exact: bool) -> Results:
    """BF16 at all sizes. The bits are those of the dense weight."""
    x, dense_weight, split = split_operands(inputs, weight, rows)
    y = compressed.compressed_linear(x, split, is_batch_invariant=is_exact)
    expected = dense.linear(x, dense_weight, is_batch_invariant=is_exact)
    return (
        Result(y, lambda: expected, assert_same_bits),
        Result(y, lambda: product_of(x, dense_weight)),
    )


def compressed_linear_with_bias(inputs: Inputs, rows: str, is_exact: bool) -> Results:
    x, dense_weight, split = split_operands(inputs, "odd", rows)
    bias = inputs.random(len(dense_weight), dtype=x.dtype, seed=2)
    y = compressed.compressed_linear(x, split, bias, is_batch_invariant=is_exact)
    return (Result(y, lambda: product_of(x, dense_weight) + bias.float()),)


def compressed_lane_linear(inputs: Inputs, weight: str, rows: str) -> Results:
    x, dense_weight, split = split_operands(inputs, weight, rows)
    lanes = even_lanes(x.shape[1], 2)
    y = compressed.compressed_linear(x, split, lanes=lanes)
    expected = laned.lane_linear(x, dense_weight, lanes=lanes)
    return (
        Result(y, lambda: expected, assert_same_bits),
        Result(y, lambda: product_of(x, dense_weight)),
    )


def decompress(inputs: Inputs, weight: str) -> Results:
    _, dense_weight, split = split_operands(inputs, weight, "one")
    found = decompressing.decompress(split)
    return (Result(found, lambda: dense_weight, assert_same_bits),)


def split_operands(inputs: Inputs, weight: str, rows: str) -> tuple[Tensor, Tensor, SplitWeight]:
    x, dense_weight = (each.bfloat16() for each in operands(inputs, weight, rows))
    if not inputs.is_computed:
        return x, dense_weight, empty_split(*dense_weight.shape)
    split = split_weight(dense_weight, is_always=True)
    assert split is not None
    return x, dense_weight, split


BOTH = (True, False)
CASES = [
    *cases(linear, weight=("qkv", "gate_up"), rows=("batch", "one", "chunk"), is_exact=BOTH),
    *cases(linear, weight=("o",), rows=("batch", "one"), is_exact=BOTH),
    *cases(linear, weight=("head",), rows=("batch", "one"), is_exact=(True,)),
    *cases(linear_with_bias, op="linear", rows=("one",), is_exact=BOTH),
    *cases(lane_linear, weight=("o", "down"), rows=("batch", "one", "chunk")),
    *cases(lane_linear_with_bias, op="lane_linear", rows=("one",)),
    *cases(per_head_linear, heads=("all",), rows=("batch", "one", "chunk")),
    *cases(per_head_linear, heads=("rank",), rows=("batch",)),
    *cases(
        grouped_linear,
        mixture=(QWEN3,),
        weight=("gate_up", "down"),
        rows=("batch", "one", "chunk"),
    ),
    *cases(grouped_linear, mixture=(MIXTRAL,), weight=("gate_up", "down"), rows=("batch",)),
    *cases(compressed_linear, weight=("gate_up",), rows=("batch", "one"), is_exact=BOTH),
    *cases(compressed_linear, weight=("o",), rows=("batch", "one", "chunk"), is_exact=BOTH),
    *cases(compressed_linear_with_bias, op="compressed_linear", rows=("one",), is_exact=BOTH),
    *cases(compressed_lane_linear, op="compressed_linear", weight=("o",), rows=("batch", "one")),
    *cases(decompress, weight=("down", "odd")),
]

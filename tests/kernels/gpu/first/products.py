"""First cases of products. A reference is the library's product in FP32."""

from __future__ import annotations

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
from tests.kernels.gpu.first.case import Inputs, Steps, cases
from tests.kernels.support.split_weights import bits_of, empty_split
from tests.kernels.support.tolerance import assert_near

NUM_LANES = 8
SUMS_TOLERANCE = 1e-3  # of sums in FP32, by their order


def product_of(x: Tensor, weight: Tensor) -> Tensor:
    return x.float() @ weight.float().T


def operands(inputs: Inputs, weight: str, rows: str) -> tuple[Tensor, Tensor]:
    shape = inputs.sizes.weights[weight]
    return inputs.random(inputs.sizes.rows[rows], shape[1]), inputs.weight(shape)


def even_lanes(width: int, num: int = NUM_LANES) -> SumLanes:
    return SumLanes.of(range(0, width + 1, width // num))


def linear(inputs: Inputs, weight: str, rows: str, is_exact: bool) -> Steps:
    x, dense_weight = operands(inputs, weight, rows)
    y = dense.linear(x, dense_weight, is_batch_invariant=is_exact)
    yield
    assert_near(y, product_of(x, dense_weight))


def linear_with_bias(inputs: Inputs, rows: str, is_exact: bool) -> Steps:
    x, dense_weight = operands(inputs, "odd", rows)
    bias = inputs.random(len(dense_weight), seed=2)
    y = dense.linear(x, dense_weight, bias, is_batch_invariant=is_exact)
    yield
    assert_near(y, product_of(x, dense_weight) + bias.float())


def lane_linear(inputs: Inputs, weight: str, rows: str) -> Steps:
    x, dense_weight = operands(inputs, weight, rows)
    lanes = even_lanes(x.shape[1])
    y = laned.lane_linear(x, dense_weight, lanes=lanes)
    sums = laned.lane_sums(x, dense_weight, lanes=lanes, num_sums=NUM_LANES)
    yield
    assert_near(y, product_of(x, dense_weight))
    for sum_of_lane, (first, end) in zip(sums, lanes.ranges, strict=True):
        expected = product_of(x[:, first:end], dense_weight[:, first:end])
        torch.testing.assert_close(sum_of_lane, expected, rtol=SUMS_TOLERANCE, atol=SUMS_TOLERANCE)
    assert torch.equal(y, add_lanes(sums)[0].to(y.dtype))


def lane_linear_with_bias(inputs: Inputs, rows: str) -> Steps:
    """Lanes of unequal widths."""
    x, dense_weight = operands(inputs, "narrow", rows)
    bias = inputs.random(len(dense_weight), seed=2)
    y = laned.lane_linear(x, dense_weight, bias, lanes=SumLanes.of((0, 32, 96)))
    yield
    assert_near(y, product_of(x, dense_weight) + bias.float())


def per_head_linear(inputs: Inputs, heads: str, rows: str) -> Steps:
    """The expansion of latents to values."""
    num, width = inputs.sizes.latent["heads"][heads], inputs.sizes.latent["width"]
    x = inputs.random(inputs.sizes.rows[rows], num, width)
    weight = inputs.weight((num * inputs.sizes.head_dim, width)).unflatten(0, (num, -1))
    y = by_head.per_head_linear(x, weight)
    yield
    assert_near(y, torch.einsum("thk,hnk->thn", x.float(), weight.float()))


def grouped_linear(inputs: Inputs, weight: str, rows: str) -> Steps:
    """Gate and up: rows that are chosen from all tokens, one lane. Down: rows by expert."""
    experts, (num_columns, width) = inputs.sizes.experts, inputs.sizes.expert_weights[weight]
    chosen = expert_rows(inputs, inputs.sizes.rows[rows])
    all_weights = inputs.weight((experts["num"] * num_columns, width))
    is_first = weight == "gate_up"
    lanes = even_lanes(width, 1 if is_first else NUM_LANES)
    tokens = chosen.tokens if is_first else None
    x = inputs.random(inputs.sizes.rows[rows] if is_first else len(chosen.tokens), width)
    y = grouped.grouped_linear(x, tokens, chosen.offsets, all_weights, lanes=lanes)
    options = {"lanes": lanes, "num_sums": lanes.num}
    sums = grouped.grouped_sums(x, tokens, chosen.offsets, all_weights, **options)
    yield
    own = x if tokens is None else x.index_select(0, tokens)
    bounds = chosen.offsets.tolist()
    parts = zip(all_weights.unflatten(0, (-1, num_columns)), bounds, bounds[1:], strict=False)
    assert_near(y, torch.cat([product_of(own[first:end], each) for each, first, end in parts]))
    assert torch.equal(y, add_lanes(sums)[0].to(y.dtype))


def expert_rows(inputs: Inputs, num_tokens: int) -> ExpertRows:
    """The rows of random experts of each token."""
    num, of_token = inputs.sizes.experts["num"], inputs.sizes.experts["of_token"]
    if not inputs.is_computed:
        empty = inputs.random(num_tokens * of_token, dtype=torch.int64)
        return ExpertRows(empty, inputs.random(num + 1, dtype=torch.int64), empty)
    scores = inputs.random(num_tokens, num, dtype=torch.float32, seed=3)
    return sort_by_expert(scores.topk(of_token).indices.sort(dim=1).values, num)


def compressed_linear(inputs: Inputs, weight: str, rows: str, is_exact: bool) -> Steps:
    """BF16 at all sizes. The bits are those of the dense weight."""
    x, dense_weight, split = split_operands(inputs, weight, rows)
    y = compressed.compressed_linear(x, split, is_batch_invariant=is_exact)
    expected = dense.linear(x, dense_weight, is_batch_invariant=is_exact)
    yield
    assert torch.equal(bits_of(y), bits_of(expected))
    assert_near(y, product_of(x, dense_weight))


def compressed_linear_with_bias(inputs: Inputs, rows: str, is_exact: bool) -> Steps:
    x, dense_weight, split = split_operands(inputs, "odd", rows)
    bias = inputs.random(len(dense_weight), dtype=x.dtype, seed=2)
    y = compressed.compressed_linear(x, split, bias, is_batch_invariant=is_exact)
    yield
    assert_near(y, product_of(x, dense_weight) + bias.float())


def compressed_lane_linear(inputs: Inputs, weight: str, rows: str) -> Steps:
    x, dense_weight, split = split_operands(inputs, weight, rows)
    lanes = even_lanes(x.shape[1], 2)
    y = compressed.compressed_linear(x, split, lanes=lanes)
    expected = laned.lane_linear(x, dense_weight, lanes=lanes)
    yield
    assert torch.equal(bits_of(y), bits_of(expected))
    assert_near(y, product_of(x, dense_weight))


def decompress(inputs: Inputs, weight: str) -> Steps:
    _, dense_weight, split = split_operands(inputs, weight, "one")
    found = decompressing.decompress(split)
    yield
    assert torch.equal(bits_of(found), bits_of(dense_weight))


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
    *cases(grouped_linear, weight=("gate_up", "down"), rows=("batch", "one", "chunk")),
    *cases(compressed_linear, weight=("gate_up",), rows=("batch", "one"), is_exact=BOTH),
    *cases(compressed_linear, weight=("o",), rows=("batch", "one", "chunk"), is_exact=BOTH),
    *cases(compressed_linear_with_bias, op="compressed_linear", rows=("one",), is_exact=BOTH),
    *cases(compressed_lane_linear, op="compressed_linear", weight=("o",), rows=("batch", "one")),
    *cases(decompress, weight=("down", "odd")),
]

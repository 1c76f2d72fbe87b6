"""Products of all heads in one launch: the bits of a batch-invariant product for each head."""

from __future__ import annotations

import pytest
import torch

from kernels import ops
from kernels.check_tensor import BadTensor
from kernels.gpu.gemm.linear import linear
from kernels.gpu.gemm.per_head_linear import per_head_linear
from kernels.reference.linear import per_head_linear as reference
from tests.support.kernels.inputs import poisoned_outputs, random
from tests.support.kernels.tolerance import assert_near

SHAPES = [(1, 1, 16, 20), (3, 5, 300, 48), (70, 3, 130, 33)]  # rows, heads, K, N


@pytest.mark.parametrize(("num_rows", "num_heads", "width", "num_columns"), SHAPES)
def test_bits_are_those_of_a_product_for_each_head(
    num_rows: int,
    num_heads: int,
    width: int,
    num_columns: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    x = random(num_rows, num_heads, 8 + width, like=device, dtype=dtype)[..., 8:]
    weight = random(num_heads, num_columns, width, like=device, dtype=dtype, seed=1)
    with poisoned_outputs():
        y = per_head_linear(x, weight)
    assert_near(y, reference(x.float(), weight.float()))
    longer = torch.full((num_rows, num_heads, num_columns + 3), 7.0, dtype=dtype, device=device)
    assert torch.equal(per_head_linear(x, weight, out=longer[..., :num_columns]), y)
    assert torch.equal(longer[..., :num_columns], y)
    assert bool((longer[..., num_columns:] == 7).all())
    for head in range(num_heads):
        alone = linear(x[:, head], weight[head], is_batch_invariant=True)
        assert torch.equal(y[:, head], alone)


def test_ops_launch_this_kernel_once(device: torch.device) -> None:
    x = random(2, 3, 16, like=device, dtype=torch.float32)
    weight = random(3, 5, 16, like=device, dtype=torch.float32, seed=1)
    found = ops.per_head_linear(x, ops.pack_heads(weight), is_batch_invariant=True)
    assert torch.equal(found, per_head_linear(x, weight))


def test_weights_of_other_heads_raise(device: torch.device) -> None:
    x = random(2, 3, 16, like=device, dtype=torch.float32)
    with pytest.raises(BadTensor, match="weight has shape"):
        per_head_linear(x, random(4, 5, 16, like=device, dtype=torch.float32))

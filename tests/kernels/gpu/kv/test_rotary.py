from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.check_tensor import BadTensor
from kernels.device import IS_INTERPRETED
from kernels.gpu.kv.rotary import rotary
from kernels.reference.rotary import rotary as reference_rotary
from tests.kernels.gpu.inputs import poisoned_outputs, random
from tests.kernels.tolerance import assert_near

LENGTHS = [1, 63, 100] if IS_INTERPRETED else [1, 63, 100, 4096]


def angles_of(num_tokens: int, half: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines as columns of a wider table, as a model with two frequencies has them."""
    angles = random(num_tokens, 2, half, like=device, dtype=torch.float32, seed=7)
    return angles.cos()[:, 1], angles.sin()[:, 1]


@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize(
    ("num_heads", "head_dim", "rotary_dim"),
    [(1, 64, 64), (7, 80, 80), (3, 80, 32), (5, 96, 96), (4, 128, 128), (2, 256, 256), (3, 16, 10)],
)
def test_rotary(
    num_tokens: int,
    num_heads: int,
    head_dim: int,
    rotary_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    x = random(num_tokens, num_heads, head_dim, like=device, dtype=dtype)
    cos, sin = angles_of(num_tokens, rotary_dim // 2, device)
    with poisoned_outputs():
        out = rotary(x, cos, sin)
    assert out.dtype == dtype
    assert_near(out, reference_rotary(x.float(), cos, sin))
    assert torch.equal(out[..., rotary_dim:], x[..., rotary_dim:])


def test_heads_with_others_between_the_tokens(dtype: torch.dtype, device: torch.device) -> None:
    heads = random(9, 8, 64, like=device, dtype=dtype)[:, 2:5]
    cos, sin = angles_of(9, 32, device)
    assert_near(rotary(heads, cos, sin), reference_rotary(heads.float(), cos, sin))


def test_no_tokens(device: torch.device) -> None:
    cos, sin = angles_of(0, 8, device)
    assert rotary(torch.empty(0, 2, 16, device=device), cos, sin).shape == (0, 2, 16)


def test_what_does_not_fit_is_named(device: torch.device) -> None:
    x = torch.ones(3, 2, 16, device=device)
    cos, sin = angles_of(3, 8, device)
    for match, arguments in {
        r"x has shape \[3, 32\]": (x.view(3, 32), cos, sin),
        r"cos has shape \[2, 8\], not \[3, any\]": (x, cos[:2], sin),
        r"cos is torch.float16": (x, cos.half(), sin),
        r"sin has shape \[3, 7\], not \[3, 8\]": (x, cos, sin[:, :7]),
        r"cos has 8 columns for heads of 15 elements": (x[..., :15], cos, sin),
    }.items():
        with pytest.raises(BadTensor, match=match):
            rotary(*arguments)

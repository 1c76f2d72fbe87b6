"""Operations of image encoders, from the library alone: it runs on a thread beside the steps, where
loops compiled for these may not run.

The rows of one call are those of one tile, always as many, so the bits of a tile depend neither on
other tiles nor on the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

Gelu = Literal["none", "tanh"]  # how it is approximated, in torch's words


def pack_encoder_weight(weight: Tensor) -> Tensor:
    """weight [N, K] -> the weight in oneDNN's layout, or unchanged where it has none."""
    is_packable = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
    if not is_packable or weight.is_mkldnn:
        return weight
    try:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    except RuntimeError:  # BF16 on a CPU without instructions for it
        return weight
    return packed


def encoder_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gelu: Gelu | None = None
) -> Tensor:
    """x [T, K], weight [N, K] packed or not, bias [N] -> [T, N]; with `gelu` its GELU."""
    if weight.is_mkldnn:
        activation, form = ("none", "") if gelu is None else ("gelu", gelu)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation, [], form)
        return y
    y = functional.linear(x, weight, bias)
    return y if gelu is None else functional.gelu(y, approximate=gelu)


def encoder_attention(query: Tensor, key: Tensor, value: Tensor, lens: Sequence[int]) -> Tensor:
    """Attention of every token to all tokens of its own sequence: [T, num_heads, dim] each, T in
    sequences of `lens` -> [T, num_heads, dim].
    """
    rows = zip(*(each.split(list(lens)) for each in (query, key, value)), strict=True)
    parts = [_attend(*each) for each in rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def rotate_pairs(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """x [T, num_heads, dim], its pairs (0, 1), (2, 3) and so on; the angles of these [T, dim / 2]
    in FP32 -> the pairs rotated, computed in FP32.
    """
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cosine, sine = cosine.unsqueeze(1), sine.unsqueeze(1)
    rotated = (first * cosine - second * sine, first * sine + second * cosine)
    return torch.stack(rotated, dim=-1).flatten(-2).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """x [T, hidden] -> the same shape."""
    return functional.layer_norm(x, weight.shape, weight, bias, eps)


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[T, num_heads, dim] each -> the same shape."""
    q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in (query, key, value))
    return functional.scaled_dot_product_attention(q, k, v).squeeze(0).transpose(0, 1)

"""A layer of an image encoder: every token of a tile sees all others of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kernels.ops import (
    Gelu,
    encoder_attention,
    encoder_linear,
    pack_encoder_weight,
    rotate_pairs,
)
from shared.engine.layers.destinations import child_destinations
from shared.engine.layers.linear import Linear
from shared.engine.layers.norm import LayerNorm

Angles = tuple[Tensor, Tensor]  # cosine and sine of each token's pairs, [T, dim / 2] in FP32


class EncoderLinear(Linear):
    """A linear layer whose GEMM is the library's; with `gelu` its GELU, exact or approximated."""

    is_compressible = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        has_bias: bool = True,
        gelu: Gelu | None = None,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(in_features, out_features, has_bias=has_bias, dtype=dtype)
        self.gelu = gelu

    def packed(self, weight: Tensor) -> Tensor:
        return pack_encoder_weight(weight)

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.weight, Tensor)
        return encoder_linear(x, self.weight, self.bias, gelu=self.gelu)


class EncoderAttention(nn.Module):
    """Attention within each sequence, in both directions."""

    def __init__(self, hidden_size: int, num_heads: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.qkv_proj = EncoderLinear(hidden_size, 3 * hidden_size, dtype=dtype)
        self.out_proj = EncoderLinear(hidden_size, hidden_size, dtype=dtype)
        self.num_heads = num_heads
        self.parts = {"qkv_proj": dict.fromkeys(("q_proj", "k_proj", "v_proj"), hidden_size)}

    def destinations(self) -> dict[str, Tensor]:
        return child_destinations(self, self.parts)

    def forward(self, x: Tensor, lens: Sequence[int], angles: Angles | None = None) -> Tensor:
        """x [T, hidden] in sequences of `lens` -> [T, hidden]; queries and keys are rotated by
        `angles`, if given.
        """
        num_tokens, size = x.shape
        qkv = self.qkv_proj(x).view(num_tokens, 3, self.num_heads, -1)
        query, key, value = qkv.unbind(1)
        if angles is not None:
            query, key = rotate_pairs(query, *angles), rotate_pairs(key, *angles)
        attended = encoder_attention(query, key, value, lens)
        return self.out_proj(attended.reshape(num_tokens, size))


class EncoderMlp(nn.Module):
    def __init__(self, hidden_size: int, inner: int, *, gelu: Gelu, dtype: torch.dtype) -> None:
        super().__init__()
        self.fc1 = EncoderLinear(hidden_size, inner, gelu=gelu, dtype=dtype)
        self.fc2 = EncoderLinear(inner, hidden_size, dtype=dtype)

    def destinations(self) -> dict[str, Tensor]:
        return child_destinations(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x))


class EncoderLayer(nn.Module):
    """Norms before attention and MLP. Submodules have SigLIP's names."""

    def __init__(
        self,
        hidden_size: int,
        inner: int,
        num_heads: int,
        eps: float,
        *,
        gelu: Gelu = "tanh",
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.layer_norm1 = LayerNorm(hidden_size, eps, dtype=dtype)
        self.self_attn = EncoderAttention(hidden_size, num_heads, dtype=dtype)
        self.layer_norm2 = LayerNorm(hidden_size, eps, dtype=dtype)
        self.mlp = EncoderMlp(hidden_size, inner, gelu=gelu, dtype=dtype)

    def destinations(self) -> dict[str, Tensor]:
        return child_destinations(self)

    def forward(self, x: Tensor, lens: Sequence[int], angles: Angles | None = None) -> Tensor:
        """x [T, hidden] in sequences of `lens` -> [T, hidden]."""
        x = x + self.self_attn(self.layer_norm1(x), lens, angles)
        return x + self.mlp(self.layer_norm2(x))

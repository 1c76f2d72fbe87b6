"""The demo model: a small Llama, implemented here so that training needs only torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """Sizes of the model, by the names of the Hugging Face Llama configuration."""

    vocab_size: int = 2048
    hidden_size: int = 256
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 32
    intermediate_size: int = 704
    max_position_embeddings: int = 8192
    rope_theta: float = 50000.0
    rms_norm_eps: float = 1e-5


def rotary_table(shape: Shape) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines [positions, C] of rotary embeddings (arXiv:2104.09864)."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    positions = torch.arange(shape.max_position_embeddings, dtype=torch.float32)
    angles = positions[:, None] / shape.rope_theta ** exponents[None, :]
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the two halves of each head: x [B, heads, T, C], cos and sin [T, C]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal grouped-query attention (arXiv:2305.13245)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        queries = shape.num_attention_heads * shape.head_dim
        keys = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)

    def heads(self, x: Tensor) -> Tensor:
        """Splits [B, T, heads * C] into [B, heads, T, C]."""
        return x.unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Maps [B, T, D] to [B, T, D]."""
        groups = self.shape.num_attention_heads // self.shape.num_key_value_heads
        value = self.heads(self.v_proj(x)).repeat_interleave(groups, dim=1)
        query = rotate(self.heads(self.q_proj(x)), cos, sin).to(value.dtype)
        key = rotate(self.heads(self.k_proj(x)), cos, sin).to(value.dtype)
        key = key.repeat_interleave(groups, dim=1)
        attend = plain_attention if x.shape[1] <= 512 else flash_attention
        return self.o_proj(attend(query, key, value).transpose(1, 2).flatten(2))


def plain_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attends with the full score matrix, which is faster for short rows on a CPU."""
    length = query.shape[2]
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    return scores.masked_fill(hidden, -math.inf).softmax(-1).to(value.dtype) @ value


def flash_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attends tile by tile, so that long rows fit into memory."""
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


class FeedForward(nn.Module):
    """Gated feed-forward network, SwiGLU (arXiv:2002.05202)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [B, T, D] to [B, T, D]."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One transformer layer with norms before its two parts."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = FeedForward(shape)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Maps [B, T, D] to [B, T, D]."""
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), cos, sin))
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))


class Llama(nn.Module):
    """Llama with tied embeddings; parameter names are those of Hugging Face without "model."."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        layers = (Layer(shape, dropout) for _ in range(shape.num_hidden_layers))
        self.layers = nn.ModuleList(layers)
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.cos, self.sin = rotary_table(shape)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = math.sqrt(2 * shape.num_hidden_layers) if into_residual else 1.0
                nn.init.normal_(parameter, std=0.02 / scale)

    def forward(self, ids: Tensor) -> Tensor:
        """Maps token ids [B, T] to the hidden states [B, T, D] before the output matrix."""
        x = self.embed_tokens(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)

    def loss(self, ids: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """Returns the weighted mean cross-entropy; all three arguments are [B, T]."""
        chosen = weights > 0
        logits = functional.linear(self(ids)[chosen], self.embed_tokens.weight)
        losses = functional.cross_entropy(logits.float(), targets[chosen], reduction="none")
        return (losses * weights[chosen]).sum() / weights[chosen].sum()

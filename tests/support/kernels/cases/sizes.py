"""The sizes of cases: on a GPU those of real models, under the interpreter small ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Mixture:
    """The sizes of a mixture of experts."""

    num_experts: int
    num_chosen: int  # experts of a token
    hidden: int
    inner: int

    def weight_shape(self, product: str) -> tuple[int, int]:
        """[N, K] of one expert's fused gate and up, or of its down."""
        wide = (2 * self.inner, self.hidden)
        return wide if product == "gate_up" else (self.hidden, self.inner)


@dataclass(frozen=True)
class Sizes:
    """The sizes of the operands. `contexts` holds lengths of sequences, `runs` pairs of new tokens
    and context.
    """

    dtype: torch.dtype
    hidden: int
    inner: int
    gelu_inner: int
    heads: int
    more_heads: int  # the heads of a larger model with as many KV heads
    kv_heads: int
    head_dim: int
    vocab: int
    block_size: int
    mixtures: dict[str, Mixture]
    latent: dict[str, Any]  # "width" of the latent, "rope", "block_size", "heads" by name
    rows: dict[str, int]
    contexts: dict[str, list[int]]
    runs: list[tuple[int, int]]
    window: int
    moved_tokens: int
    copies: dict[str, int]

    @property
    def weights(self) -> dict[str, tuple[int, int]]:
        """[N, K] of the products of a layer, and of the head."""
        queries = self.heads * self.head_dim
        return {
            "qkv": (queries + 2 * self.kv_heads * self.head_dim, self.hidden),
            "o": (self.hidden, queries),
            "gate_up": (2 * self.inner, self.hidden),
            "down": (self.hidden, self.inner),
            "head": (self.vocab, self.hidden),
            "odd": (63, 100),
            "narrow": (63, 96),
        }


QWEN3, MIXTRAL = "Qwen3-30B-A3B", "Mixtral-8x7B"
# Llama-3.1-8B, and the heads of 70B. GeGLU of Gemma 2 9B; latents of DeepSeek-V3.
REAL = Sizes(
    dtype=torch.bfloat16,
    hidden=4096,
    inner=14_336,
    gelu_inner=14_336,
    heads=32,
    more_heads=64,
    kv_heads=8,
    head_dim=128,
    vocab=128_256,
    block_size=16,
    mixtures={QWEN3: Mixture(128, 8, 2048, 768), MIXTRAL: Mixture(8, 2, 4096, 14_336)},
    latent={
        **{"width": 512, "rope": 64, "block_size": 64},
        "heads": {"rank": 8, "sixteen": 16, "half": 64, "all": 128},
    },
    rows={"one": 1, "batch": 64, "chunk": 512},
    contexts={
        "one": [8191],
        "batch": [2048 - 31 * seq for seq in range(64)],
        "latents": [4097, 1, 700, 64, *range(100, 160)],
    },
    runs=[(1500, 1500), (512, 8192), (1, 100), (0, 0)],
    window=1000,
    moved_tokens=700,
    copies={"one": 1, "some": 16, "many": 512},
)
SMALL = Sizes(
    dtype=torch.float32,
    hidden=128,
    inner=192,
    gelu_inner=80,
    heads=4,
    more_heads=6,
    kv_heads=2,
    head_dim=32,
    vocab=300,
    block_size=16,
    mixtures={QWEN3: Mixture(4, 2, 128, 32), MIXTRAL: Mixture(4, 2, 64, 256)},
    latent={
        **{"width": 32, "rope": 8, "block_size": 16},
        "heads": {"rank": 3, "sixteen": 2, "half": 5, "all": 8},
    },
    rows={"one": 1, "batch": 5, "chunk": 9},
    contexts={"one": [150], "batch": [63, 0, 1, 140], "latents": [40, 1]},
    runs=[(20, 20), (7, 150), (1, 30), (0, 0)],
    window=40,
    moved_tokens=20,
    copies={"one": 1, "some": 3, "many": 7},
)

"""Synthetic weights in the shapes of Llama 3.1 8B, with known statistics.

    w[row, column] = scale[row] * t        scale = 0.02 * exp(spread * normal),  t ~ Student's t

In trained models the exponents have about 2.6 bits of entropy, and rows of one matrix differ in
scale by some ten per cent (the demo model's: 2.53 to 2.56 bits, spread 0.02 to 0.12, normal tails).
`usual` is slightly worse than that, `harsh` much worse.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

HIDDEN, INTERMEDIATE, KV, VOCAB, NUM_LAYERS = 4096, 14336, 1024, 128_256, 32
LAYER_SHAPES: dict[str, tuple[int, ...]] = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
}
OTHER_SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens": (VOCAB, HIDDEN),
    "lm_head": (VOCAB, HIDDEN),
    "model.norm": (HIDDEN,),
}
WHOLE_MODEL = [(kind, shape, NUM_LAYERS) for kind, shape in LAYER_SHAPES.items()] + [
    (kind, shape, 1) for kind, shape in OTHER_SHAPES.items()
]


class Statistics(msgspec.Struct, frozen=True):
    """The distribution of weights. `spread` is that of the logarithm of the rows' scales. Fewer
    `degrees` of freedom mean heavier tails.
    """

    spread: float
    degrees: float


STATISTICS = {"usual": Statistics(0.2, 6.0), "harsh": Statistics(0.5, 4.0)}


def weights(
    shape: tuple[int, ...], statistics: Statistics, draw: np.random.Generator
) -> NDArray[np.uint16]:
    """Returns BF16 words; a one-dimensional shape is a norm: 1 + 0.1 * normal."""
    if len(shape) == 1:
        return bf16(1 + 0.1 * draw.standard_normal(shape, np.float32))
    words = np.empty(shape, np.uint16)
    rows = max(1, (1 << 22) // shape[1])
    for start in range(0, shape[0], rows):
        words[start : start + rows] = _rows(words[start : start + rows].shape, statistics, draw)
    return words


def _rows(
    shape: tuple[int, ...], statistics: Statistics, draw: np.random.Generator
) -> NDArray[np.uint16]:
    half = statistics.degrees / 2
    scale = 0.02 * np.exp(statistics.spread * draw.standard_normal((shape[0], 1), np.float32))
    chi_square = draw.standard_gamma(half, shape, np.float32) / np.float32(half)
    return bf16(scale * draw.standard_normal(shape, np.float32) / np.sqrt(chi_square))


def bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Rounds to nearest, ties to even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def write_layers(
    folder: Path, statistics: Statistics, *, num_layers: int, rows_divisor: int
) -> None:
    """A folder with a shard per layer and one for the rest; matrices have a part of their rows."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(0)
    shards: dict[str, dict[str, tuple[int, ...]]] = {
        f"layer-{number}.safetensors": {
            f"model.layers.{number}.{kind}.weight": shape for kind, shape in LAYER_SHAPES.items()
        }
        for number in range(num_layers)
    }
    shards["others.safetensors"] = {f"{kind}.weight": each for kind, each in OTHER_SHAPES.items()}
    for file_name, shapes in shards.items():
        words = {
            name: weights(fewer_rows(shape, rows_divisor), statistics, draw)
            for name, shape in shapes.items()
        }
        save_file({name: bf16_tensor(each) for name, each in words.items()}, folder / file_name)
    weight_map = {name: file_name for file_name, shapes in shards.items() for name in shapes}
    index = msgspec.json.encode({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_bytes(index)


def fewer_rows(shape: tuple[int, ...], divisor: int) -> tuple[int, ...]:
    return shape if len(shape) == 1 else (shape[0] // divisor, *shape[1:])


def bf16_tensor(words: NDArray[np.uint16]) -> torch.Tensor:
    """Returns a tensor over the same memory."""
    return torch.from_numpy(words.view(np.int16)).view(torch.bfloat16)

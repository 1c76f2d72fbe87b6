"""The image encoder of Llama 4.

    tile [3, H, W] ──patches──▶ [h · w, hidden], then one class token, + learned positions
        ──norm, layers with rotated queries and keys, norm──▶ without the class token
        squares of scale² patches as one vector ──adapter, projector──▶ [tokens, output_size]

A patch at column x and row y has two kinds of pairs: the first half of them rotates by x + 1, the
second by y + 1, both with the same frequencies. The class token's do not rotate.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor, nn

from shared.engine.layers.encoder_layer import Angles, EncoderLayer, EncoderLinear
from shared.engine.layers.linear import unset_parameter
from shared.engine.layers.norm import LayerNorm
from shared.engine.model_config.vision_config import Llama4VisionConfig
from shared.engine.models.vision.patches import named, patches_of, shuffled

# Its names for the parts of a layer, which have SigLIP's names in `EncoderLayer`
_LAYER_NAMES = {
    "layer_norm1.": "input_layernorm.",
    "layer_norm2.": "post_attention_layernorm.",
    "self_attn.out_proj.": "self_attn.o_proj.",
}


class Llama4Encoder(nn.Module):
    """`forward` takes tiles one after the other: a tile's bits do not depend on others."""

    def __init__(self, config: Llama4VisionConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, patch = config.hidden_size, config.patch_size
        self.config = config
        self.dtype = dtype
        self.patch_embedding = EncoderLinear(3 * patch * patch, hidden, has_bias=False, dtype=dtype)
        self.class_embedding = unset_parameter(hidden, dtype=dtype)
        self.positions = unset_parameter(config.patches_per_side**2 + 1, hidden, dtype=dtype)
        self.norm_before = LayerNorm(hidden, config.layer_norm_eps, dtype=dtype)
        self.layers = nn.ModuleList(
            EncoderLayer(
                hidden,
                config.intermediate_size,
                config.num_heads,
                config.layer_norm_eps,
                gelu="none",
                dtype=dtype,
            )
            for _ in range(config.num_layers)
        )
        self.norm_after = LayerNorm(hidden, config.layer_norm_eps, dtype=dtype)
        sizes = (hidden * config.scale_factor**2, config.adapter_size, config.adapter_output_size)
        self.adapter = nn.ModuleList(
            EncoderLinear(*pair, has_bias=False, gelu="none", dtype=dtype)
            for pair in pairwise(sizes)
        )
        self.projector = EncoderLinear(sizes[-1], config.output_size, has_bias=False, dtype=dtype)

    @torch.inference_mode()
    def forward(self, tiles: Tensor) -> Tensor:
        """tiles [N, 3, H, W], normalized, in FP32 -> [N · tokens, output_size]."""
        return torch.cat([self.encode_tile(tile) for tile in tiles.to(self.dtype)])

    def encode_tile(self, tile: Tensor) -> Tensor:
        """tile [3, H, W] -> [tokens, output_size]."""
        side = self.config.patches_per_side
        x = self.patch_embedding(patches_of(tile, self.config.patch_size))
        x = torch.cat([x, self.class_embedding.unsqueeze(0)]) + self.positions
        x = self.norm_before(x)
        dim = self.config.hidden_size // self.config.num_heads
        cosine, sine = _angles(side, dim, self.config.rope_theta)
        angles = cosine.to(x.device), sine.to(x.device)
        for layer in self.layers:
            x = layer(x, [side * side + 1], angles)
        x = self.norm_after(x)[:-1].view(side, side, -1)
        x = shuffled(x, self.config.scale_factor)
        for linear in self.adapter:
            x = linear(x)
        return self.projector(x)

    def weight_destinations(self) -> dict[str, Tensor]:
        """Returns the checkpoint's tensor names -> their destinations."""
        first, second = self.adapter
        assert isinstance(first, EncoderLinear) and isinstance(second, EncoderLinear)
        found = {
            "vision_model.patch_embedding.linear.weight": self.patch_embedding.parameter,
            "vision_model.class_embedding": self.class_embedding,
            "vision_model.positional_embedding_vlm": self.positions,
            "vision_model.vision_adapter.mlp.fc1.weight": first.parameter,
            "vision_model.vision_adapter.mlp.fc2.weight": second.parameter,
            "multi_modal_projector.linear_1.weight": self.projector.parameter,
            **named("vision_model.layernorm_pre.", self.norm_before),
            **named("vision_model.layernorm_post.", self.norm_after),
        }
        for index, layer in enumerate(self.layers):
            found |= named(f"vision_model.model.layers.{index}.", layer, _LAYER_NAMES)
        return {name: tensor.detach() for name, tensor in found.items()}


@lru_cache(4)
def _angles(side: int, dim: int, theta: float) -> Angles:
    """Returns cosines and sines of the patches and of the class token, [side² + 1, dim / 2]."""
    half = dim // 2
    exponents = torch.arange(0, half, 2, dtype=torch.float32, device="cpu") / half
    frequencies = 1.0 / theta**exponents
    places = torch.arange(1, side + 1, dtype=torch.float32, device="cpu")[:, None] * frequencies
    columns = places.repeat(side, 1)
    rows = places.repeat_interleave(side, dim=0)
    angles = torch.cat([columns, rows], dim=1)
    angles = torch.cat([angles, torch.zeros(1, angles.shape[1], device="cpu")])
    return angles.cos(), angles.sin()

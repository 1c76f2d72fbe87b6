"""SigLIP with a pixel shuffle, the image encoder of SmolVLM and Idefics 3.

    tile [3, H, W] ──patches──▶ [h · w, hidden] + position of each ──layers, norm──▶
        squares of scale² patches as one vector ──linear──▶ [tokens, output_size]

Positions are those of a tile of `image_size`: a smaller tile's patches take the positions at the
same fractions of its sides.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn

from shared.engine.layers.encoder_layer import EncoderLayer, EncoderLinear
from shared.engine.layers.linear import unset_parameter
from shared.engine.layers.norm import LayerNorm
from shared.engine.model_config.vision_config import SiglipConfig
from shared.engine.models.vision.patches import patches_of, shuffled


class SiglipEncoder(nn.Module):
    """`forward` takes tiles one after the other: a tile's bits do not depend on others."""

    def __init__(self, config: SiglipConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, patch = config.hidden_size, config.patch_size
        self.config = config
        self.dtype = dtype
        self.patch_embedding = EncoderLinear(3 * patch * patch, hidden, dtype=dtype)
        self.position_embedding = unset_parameter(config.patches_per_side**2, hidden, dtype=dtype)
        self.layers = nn.ModuleList(
            EncoderLayer(
                hidden,
                config.intermediate_size,
                config.num_heads,
                config.layer_norm_eps,
                dtype=dtype,
            )
            for _ in range(config.num_layers)
        )
        self.post_layernorm = LayerNorm(hidden, config.layer_norm_eps, dtype=dtype)
        self.projection = EncoderLinear(
            hidden * config.scale_factor**2, config.output_size, has_bias=False, dtype=dtype
        )

    @torch.inference_mode()
    def forward(self, tiles: Tensor) -> Tensor:
        """tiles [N, 3, H, W], normalized, in FP32 -> [N · tokens, output_size]."""
        return torch.cat([self.encode_tile(tile) for tile in tiles.to(self.dtype)])

    def encode_tile(self, tile: Tensor) -> Tensor:
        """tile [3, H, W] -> [tokens, output_size]; H and W multiples of patch · scale_factor."""
        height, width = (side // self.config.patch_size for side in tile.shape[1:])
        positions = _positions(height, width, self.config.patches_per_side).to(tile.device)
        x = self.patch_embedding(patches_of(tile, self.config.patch_size))
        x = x + self.position_embedding.index_select(0, positions)
        for layer in self.layers:
            x = layer(x, [height * width])
        x = self.post_layernorm(x).view(height, width, -1)
        return self.projection(shuffled(x, self.config.scale_factor))

    def weight_destinations(self) -> dict[str, Tensor]:
        """Returns the checkpoint's tensor names -> their destinations."""
        patch = self.config.patch_size
        weight = self.patch_embedding.parameter.view(-1, 3, patch, patch)
        assert self.patch_embedding.bias is not None
        found = {
            "vision_model.embeddings.patch_embedding.weight": weight,
            "vision_model.embeddings.patch_embedding.bias": self.patch_embedding.bias,
            "vision_model.embeddings.position_embedding.weight": self.position_embedding,
            "connector.modality_projection.proj.weight": self.projection.parameter,
        }
        for name, tensor in self.post_layernorm.destinations().items():
            found[f"vision_model.post_layernorm.{name}"] = tensor
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, EncoderLayer)
            for name, tensor in layer.destinations().items():
                found[f"vision_model.encoder.layers.{index}.{name}"] = tensor
        return {name: tensor.detach() for name, tensor in found.items()}


@lru_cache(64)
def _positions(height: int, width: int, per_side: int) -> Tensor:
    """Returns the position of each patch, [height · width], with the roundings of transformers."""
    step = 1 / per_side
    boundaries = torch.arange(step, 1.0, step, device="cpu")

    def buckets(num_patches: int) -> Tensor:
        fraction = torch.arange(num_patches, dtype=torch.float32, device="cpu") * (
            1.0 / torch.tensor(num_patches, device="cpu")
        )
        return torch.bucketize(fraction.clamp_(max=1.0 - 1e-6), boundaries, right=True)

    return (buckets(height)[:, None] * per_side + buckets(width)).flatten()

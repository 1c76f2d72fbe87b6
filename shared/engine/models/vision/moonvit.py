"""MoonViT, the image encoder of Kimi K2.5, for images of any size.

    image [3, H, W] ──patches──▶ [h · w, hidden] + learned positions, resampled to h × w
        ──layers with rotated queries and keys, norm──▶ squares of patches, each patch normalised
        ──linear, GELU, linear──▶ [tokens, output_size]

Pairs of queries and keys rotate in turn by a patch's column and by its row: pair 2i and pair 2i + 1
have the frequency theta^(-4i / dim). A single image has no place in time.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from shared.engine.layers.encoder_layer import Angles, EncoderLayer, EncoderLinear
from shared.engine.layers.linear import unset_parameter
from shared.engine.layers.norm import LayerNorm
from shared.engine.model_config.vision_config import MoonVitConfig
from shared.engine.models.vision.patches import named, patches_of, shuffled

EPS = 1e-5  # of its own norms
THETA = 10_000.0


class MoonVit(nn.Module):
    """`forward` takes images of one size, one after the other."""

    def __init__(self, config: MoonVitConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, patch = config.hidden_size, config.patch_size
        self.config = config
        self.dtype = dtype
        self.patch_embedding = EncoderLinear(3 * patch * patch, hidden, dtype=dtype)
        self.positions = unset_parameter(
            config.position_rows, config.position_columns, hidden, dtype=dtype
        )
        self.layers = nn.ModuleList(
            EncoderLayer(
                hidden, config.intermediate_size, config.num_heads, EPS, gelu="tanh", dtype=dtype
            )
            for _ in range(config.num_layers)
        )
        self.norm_after = LayerNorm(hidden, EPS, dtype=dtype)
        self.norm_before_projector = LayerNorm(hidden, config.projector_eps, dtype=dtype)
        merged = hidden * config.merge_size**2
        self.projector_in = EncoderLinear(merged, merged, gelu="none", dtype=dtype)
        self.projector_out = EncoderLinear(merged, config.output_size, dtype=dtype)

    @torch.inference_mode()
    def forward(self, images: Tensor) -> Tensor:
        """images [N, 3, H, W], normalized, in FP32 -> [N · tokens, output_size]."""
        return torch.cat([self.encode_image(image) for image in images.to(self.dtype)])

    def encode_image(self, image: Tensor) -> Tensor:
        """image [3, H, W] -> [tokens, output_size]; H and W multiples of patch · merge_size."""
        height, width = (side // self.config.patch_size for side in image.shape[1:])
        x = self.patch_embedding(patches_of(image, self.config.patch_size))
        x = x + self._positions(height, width)
        dim = self.config.hidden_size // self.config.num_heads
        cosine, sine = _angles(height, width, dim)
        angles = cosine.to(x.device), sine.to(x.device)
        for layer in self.layers:
            x = layer(x, [height * width], angles)
        x = self.norm_before_projector(self.norm_after(x)).view(height, width, -1)
        return self.projector_out(self.projector_in(shuffled(x, self.config.merge_size)))

    def _positions(self, height: int, width: int) -> Tensor:
        """Returns [height · width, hidden], resampled in FP32."""
        learned: Tensor = self.positions
        if learned.shape[:2] != (height, width):
            planes = learned.float().permute(2, 0, 1).unsqueeze(0)
            found = functional.interpolate(planes, (height, width), mode="bicubic")
            learned = found.squeeze(0).permute(1, 2, 0).to(self.dtype)
        return learned.flatten(0, 1)

    def weight_destinations(self) -> dict[str, Tensor]:
        """Returns the checkpoint's tensor names -> their destinations."""
        patch = self.config.patch_size
        embedding = self.patch_embedding
        assert embedding.bias is not None
        found = {
            "vision_tower.patch_embed.proj.weight": embedding.parameter.view(-1, 3, patch, patch),
            "vision_tower.patch_embed.proj.bias": embedding.bias,
            "vision_tower.patch_embed.pos_emb.weight": self.positions,
            **named("vision_tower.encoder.final_layernorm.", self.norm_after),
            **named("mm_projector.pre_norm.", self.norm_before_projector),
            **named("mm_projector.proj.0.", self.projector_in),
            **named("mm_projector.proj.2.", self.projector_out),
        }
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, EncoderLayer)
            block, attention = f"vision_tower.encoder.blocks.{index}.", layer.self_attn
            found |= named(f"{block}norm0.", layer.layer_norm1)
            found |= named(f"{block}norm1.", layer.layer_norm2)
            found |= named(f"{block}wqkv.", attention.qkv_proj)
            found |= named(f"{block}wo.", attention.out_proj)
            found |= named(f"{block}mlp.fc0.", layer.mlp.fc1)
            found |= named(f"{block}mlp.fc1.", layer.mlp.fc2)
        return {name: tensor.detach() for name, tensor in found.items()}


@lru_cache(16)
def _angles(height: int, width: int, dim: int) -> Angles:
    """Returns cosines and sines of the patches, [height · width, dim / 2]."""
    exponents = torch.arange(0, dim, 4, dtype=torch.float32, device="cpu") / dim
    frequencies = 1.0 / THETA**exponents

    def places(count: int) -> Tensor:
        return torch.arange(count, dtype=torch.float32, device="cpu")[:, None] * frequencies

    columns = places(width).repeat(height, 1)
    rows = places(height).repeat_interleave(width, dim=0)
    angles = torch.stack([columns, rows], dim=-1).flatten(1)
    return angles.cos(), angles.sin()

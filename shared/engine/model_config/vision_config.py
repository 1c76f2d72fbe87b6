"""The description of an image encoder, which puts vectors in place of a prompt's image tokens."""

from __future__ import annotations

import msgspec


class VisionConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A SigLIP encoder whose output patches are shuffled in squares of `scale_factor` to single
    vectors, and projected to `output_size`, the text model's width.

    Tiles are `image_size` pixels wide and high; each becomes `tokens_per_tile` tokens of the id
    `image_token_id`.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    image_size: int
    patch_size: int
    layer_norm_eps: float
    scale_factor: int
    image_token_id: int
    output_size: int

    @property
    def patches_per_side(self) -> int:
        return self.image_size // self.patch_size

    @property
    def tokens_per_tile(self) -> int:
        side: int = self.patches_per_side // self.scale_factor
        return side * side

    @property
    def tile_shape(self) -> tuple[int, int, int]:
        return 3, self.image_size, self.image_size

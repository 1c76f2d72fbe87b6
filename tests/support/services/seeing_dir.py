"""A complete small model that takes images: a SmolVLM by chance, with the files of a gateway."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tests.support.engine.vision.vision_models import write_smolvlm
from tests.support.services.vision_dir import PATCH, PREPROCESSOR, SCALE, TILE, write_vision_dir


def write_seeing_dir(
    model_dir: Path, vision: dict[str, int] | None = None, scale: int = SCALE
) -> Path:
    """`vision`: fields of the encoder's config."""
    vision = vision or {"image_size": TILE, "patch_size": PATCH}
    write_vision_dir(model_dir)
    config = msgspec.json.decode((model_dir / "config.json").read_bytes())
    write_smolvlm(
        model_dir,
        image_token_id=config["image_token_id"],
        scale_factor=scale,
        text=config["text_config"],
        vision=vision,
    )
    side = vision["image_size"]
    edges = {"size": {"longest_edge": 4 * side}, "max_image_size": {"longest_edge": side}}
    processor = msgspec.json.encode({**PREPROCESSOR, **edges})
    (model_dir / "preprocessor_config.json").write_bytes(processor)
    return model_dir

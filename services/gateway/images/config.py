"""How a checkpoint takes images, by its family. Loads neither Pillow nor numpy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from services.gateway.images.families import idefics3_config, kimi_config, llama4_config
from services.gateway.images.families.config_files import (
    FoundFile,
    decoded,
    model_file,
    processor_file,
)
from services.gateway.images.families.idefics3_config import Idefics3Config
from services.gateway.images.families.kimi_config import KimiConfig
from services.gateway.images.families.llama4_config import Llama4Config

ImageConfig = Idefics3Config | Llama4Config | KimiConfig
# Reads a folder's config.json and the fields of its image processor.
Read = Callable[[FoundFile, FoundFile], ImageConfig | None]
FAMILIES: dict[str, Read] = {
    model_type: family.read
    for family in (idefics3_config, llama4_config, kimi_config)
    for model_type in family.MODEL_TYPES
}


class _ModelType(msgspec.Struct, frozen=True):
    model_type: str = ""


def read_image_config(model_dir: Path) -> ImageConfig | None:
    """Returns how the model takes images; None: it takes none. Raises ConfigError for files that
    say so in a way that is not supported.
    """
    model = model_file(model_dir)
    read = FAMILIES.get(decoded(model, _ModelType).model_type)
    processor = None if read is None else processor_file(model_dir)
    return None if read is None or processor is None else read(model, processor)

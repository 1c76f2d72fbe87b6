"""How a checkpoint takes images, by its family. Loads neither Pillow nor numpy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from services.gateway.images.families import idefics3_config, kimi_config, llama4_config
from services.gateway.images.families.config_files import CONFIG, PROCESSOR, bytes_of, decoded
from services.gateway.images.families.idefics3_config import Idefics3Config
from services.gateway.images.families.kimi_config import KimiConfig
from services.gateway.images.families.llama4_config import Llama4Config

ImageConfig = Idefics3Config | Llama4Config | KimiConfig
# Reads a folder's config.json and preprocessor_config.json.
Read = Callable[[Path, bytes, bytes], ImageConfig | None]
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
    path = model_dir / CONFIG
    model_file, processor_file = bytes_of(path) or b"{}", bytes_of(model_dir / PROCESSOR)
    read = FAMILIES.get(decoded(path, model_file, _ModelType).model_type)
    if read is None or processor_file is None:
        return None
    return read(model_dir, model_file, processor_file)

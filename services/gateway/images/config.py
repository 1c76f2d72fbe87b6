"""How a checkpoint takes images, from its `preprocessor_config.json` and `config.json`."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from shared.errors import ConfigError
from shared.tokenizer.checkpoint_file import exists, read_checkpoint_file
from shared.transport.wire_errors import UNREADABLE

FAMILIES = ("idefics3", "smolvlm")  # by `model_type`: one processor
LANCZOS = 1  # of Pillow's filters
MAX_TILES_ASIDE = 16
MAX_TILE_SIZE = 2048
HALF = (0.5, 0.5, 0.5)  # what workers normalise with
IMAGE_TOKEN = "<image>"
DIGEST_BYTES = 16

Size = Annotated[int, Meta(ge=1, le=MAX_TILE_SIZE * MAX_TILES_ASIDE)]


class ImageConfig(msgspec.Struct, frozen=True):
    """The processor of Idefics3 and SmolVLM. An image is resized until its longest edge has
    `longest_edge` pixels, and cut into square tiles of `tile_size` pixels, each of which takes
    `tokens_per_tile` tokens of the prompt; unless it `is_split`, it is one tile. `digest`: of the
    files that say so.
    """

    tile_size: int
    longest_edge: int
    tokens_per_tile: int
    image_token_id: int
    digest: bytes
    is_split: bool = True


class _Edge(msgspec.Struct, frozen=True):
    longest_edge: Size


class _Vision(msgspec.Struct, frozen=True):
    """With the defaults of transformers, as `_Model`."""

    image_size: Size = 224
    patch_size: Size = 32


class _Model(msgspec.Struct, frozen=True):
    model_type: str = ""
    image_token_id: Annotated[int, Meta(ge=0)] = 128_257
    scale_factor: Annotated[int, Meta(ge=1, le=64)] = 2
    vision_config: msgspec.Raw = msgspec.Raw(b"{}")


class _Processor(msgspec.Struct, frozen=True):
    """The fields as Pillow's processor in transformers has them, with its defaults."""

    size: _Edge
    max_image_size: _Edge
    resample: int = LANCZOS
    do_resize: bool = True
    do_rescale: bool = True
    do_normalize: bool = True
    do_convert_rgb: bool = True
    do_image_splitting: bool = True
    rescale_factor: float = 1 / 255
    image_mean: tuple[float, ...] = HALF
    image_std: tuple[float, ...] = HALF


def read_image_config(model_dir: Path) -> ImageConfig | None:
    """Returns how the model takes images; None: it takes none. Raises ConfigError for files that
    say so in a way that is not supported.
    """
    text = _bytes_of(model_dir / "config.json")
    model = _decoded(model_dir / "config.json", text or b"{}", _Model)
    processor_file = model_dir / "preprocessor_config.json"
    given = _bytes_of(processor_file)
    if model.model_type not in FAMILIES or given is None:
        return None
    processor = _decoded(processor_file, given, _Processor)
    vision = _decoded(model_dir / "config.json", bytes(model.vision_config), _Vision)
    _check(processor, vision, processor_file)
    patches = max(1, vision.image_size // vision.patch_size)
    sizes = (vision.image_size, vision.patch_size, model.scale_factor)
    digest = blake2b(given + repr(sizes).encode(), digest_size=DIGEST_BYTES)
    return ImageConfig(
        tile_size=processor.max_image_size.longest_edge,
        longest_edge=processor.size.longest_edge,
        tokens_per_tile=patches**2 // model.scale_factor**2,
        image_token_id=model.image_token_id,
        digest=digest.digest(),
        is_split=processor.do_image_splitting,
    )


def _check(processor: _Processor, vision: _Vision, path: Path) -> None:
    """Raises ConfigError for a processor that transforms images in another way."""
    tile, longest = processor.max_image_size.longest_edge, processor.size.longest_edge
    for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if not getattr(processor, name):
            raise ConfigError(f"{path}: {name} must be true")
    if processor.resample != LANCZOS:
        raise ConfigError(f"{path}: resample must be {LANCZOS}, Lanczos")
    if abs(processor.rescale_factor * 255 - 1) > 1e-6:
        raise ConfigError(f"{path}: rescale_factor must be 1/255")
    if (processor.image_mean, processor.image_std) != (HALF, HALF):
        raise ConfigError(f"{path}: image_mean and image_std must be {list(HALF)}")
    if tile != vision.image_size:
        raise ConfigError(
            f"{path}: max_image_size {tile} is not vision_config.image_size, {vision.image_size}"
        )
    if tile > MAX_TILE_SIZE or longest > tile * MAX_TILES_ASIDE:
        raise ConfigError(
            f"{path}: tiles of {tile} in images of {longest} pixels; the limits are "
            f"{MAX_TILE_SIZE} and {MAX_TILES_ASIDE} tiles in a row"
        )


def _bytes_of(path: Path) -> bytes | None:
    try:
        return read_checkpoint_file(path) if exists(path) else None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def _decoded(path: Path, data: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except UNREADABLE as error:
        raise ConfigError(f"cannot read {path}: {error}") from error

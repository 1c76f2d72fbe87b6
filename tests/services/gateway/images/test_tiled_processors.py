"""The processors of Llama 4 and Kimi K2.5: grids, pixels and prompts of their references."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import interpolate

from services.gateway.images.config import read_image_config
from services.gateway.images.families.kimi import KimiProcessor
from services.gateway.images.families.kimi_config import KimiConfig
from services.gateway.images.families.llama4 import Llama4Processor
from services.gateway.images.families.llama4_config import Llama4Config
from shared.errors import ConfigError

TILE, PATCH = 24, 4
# (width, height) -> rows and columns, as transformers 5.24 chooses them, of at
# most 16 tiles, and of at most 5 that are filled
GRIDS = {
    (1, 1): ((0, 0), (2, 2)),
    (24, 24): ((0, 0), (2, 2)),
    (25, 23): ((1, 2), (2, 2)),
    (200, 150): ((3, 4), (2, 2)),
    (90, 251): ((6, 2), (3, 1)),
    (96, 96): ((4, 4), (2, 2)),
    (500, 7): ((1, 16), (1, 5)),
    (3, 900): ((16, 1), (5, 1)),
    (48, 72): ((3, 2), (2, 2)),
    (30, 20): ((1, 2), (2, 2)),
    (64, 400): ((8, 2), (5, 1)),
}
# The size on a canvas that decides it, as transformers rounds it in FP32: FP64 gives another
SIZES_ON_CANVAS = {(183, 183): (95, 96), (194, 97): (120, 59)}


def drawn(width: int, height: int) -> Image.Image:
    """A picture whose pixels all differ from their neighbours'."""
    rng = np.random.default_rng(width * 1000 + height)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))


def resized(image: Image.Image, size: tuple[int, int], mode: str) -> np.ndarray:
    """Returns [3, height, width] by torch, as torchvision resizes tensors."""
    pixels = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).unsqueeze(0)
    found = interpolate(pixels.float(), size[::-1], mode=mode, antialias=True)
    return found.round().clamp(0, 255)[0].numpy()


def llama4(max_tiles: int = 16, *, fills_canvas: bool = False) -> Llama4Processor:
    return Llama4Processor(
        Llama4Config(
            tile_size=TILE,
            tokens_per_tile=9,
            image_token_id=0,
            digest=b"",
            max_tiles=max_tiles,
            fills_canvas=fills_canvas,
        )
    )


def kimi(max_patches: int = 16_384, max_patches_aside: int = 512) -> KimiProcessor:
    return KimiProcessor(
        KimiConfig(
            patch_size=PATCH,
            merge_size=2,
            max_patches=max_patches,
            max_patches_aside=max_patches_aside,
            image_token_id=0,
            digest=b"",
        )
    )


@pytest.mark.parametrize("size", GRIDS)
def test_canvases_of_llama4_are_those_of_transformers(size: tuple[int, int]) -> None:
    assert (llama4().grid_of(*size), llama4(5, fills_canvas=True).grid_of(*size)) == GRIDS[size]
    assert llama4().grid_of(*size, "low") == (0, 0)


@pytest.mark.parametrize(("size", "found"), SIZES_ON_CANVAS.items())
def test_sizes_on_a_canvas_are_rounded_as_in_transformers(
    size: tuple[int, int], found: tuple[int, int]
) -> None:
    rows, columns = llama4().grid_of(*size)
    tiles = llama4().pixels_of(Image.new("RGB", size, (255, 255, 255)))[:-1]
    shown = tiles.reshape(rows, columns, 3, TILE, TILE).transpose(2, 0, 3, 1, 4)
    canvas = shown.reshape(3, rows * TILE, columns * TILE)[0]
    assert (int(canvas[0].astype(bool).sum()), int(canvas[:, 0].astype(bool).sum())) == found


def test_tiles_of_llama4_are_the_canvas_and_the_complete_image() -> None:
    image = drawn(60, 40)  # on a canvas of 2 x 3 tiles it keeps its size
    tiles = llama4().pixels_of(image)
    assert llama4().grid_of(60, 40) == (2, 3) and tiles.shape == (7, 3, TILE, TILE)
    canvas = np.zeros((3, 48, 72), np.uint8)
    canvas[:, :40, :60] = np.asarray(image).transpose(2, 0, 1)
    for row in range(2):
        for column in range(3):
            part = canvas[:, row * TILE :, column * TILE :][:, :TILE, :TILE]
            assert np.array_equal(tiles[row * 3 + column], part)
    expected = resized(image, (TILE, TILE), "bilinear")
    assert np.abs(tiles[6].astype(int) - expected).max() <= 1


def test_a_large_image_of_llama4_is_shrunk_at_its_aspect_ratio() -> None:
    image = drawn(700, 350)
    tiles = llama4(2).pixels_of(image)
    assert tiles.shape == (3, 3, TILE, TILE)
    both = np.concatenate([tiles[0], tiles[1]], axis=2)
    assert np.abs(both.astype(int) - resized(image, (48, 24), "bilinear")).max() <= 1


@pytest.mark.parametrize("grid", [(0, 0), (1, 2), (3, 4)])
def test_placeholders_of_llama4_are_those_of_transformers(grid: tuple[int, int]) -> None:
    processing = pytest.importorskip("transformers.models.llama4.processing_llama4")
    ratio = (1, 1) if grid == (0, 0) else grid
    expected = processing.Llama4Processor._prompt_split_image(SimpleNamespace(), ratio, 9)
    assert llama4().placeholder(grid) == expected
    assert expected.count("<|patch|>") == llama4().config.num_tokens(grid)


@pytest.mark.parametrize(
    ("size", "limits", "grid", "kept"),
    [
        ((16, 24), (16_384, 512), (3, 2), (16, 24)),
        ((17, 1), (16_384, 512), (1, 3), (17, 1)),
        ((100, 60), (60, 512), (3, 5), (40, 24)),  # 375 patches: by the root of 60 / 375
        ((500, 7), (16_384, 16), (1, 8), (64, 1)),  # 16 patches of 4 pixels
        ((3, 900), (16_384, 512), (113, 1), (3, 900)),
    ],
)
def test_kimi_keeps_the_size_up_to_its_limits(
    size: tuple[int, int], limits: tuple[int, int], grid: tuple[int, int], kept: tuple[int, int]
) -> None:
    processor, image = kimi(*limits), drawn(*size)
    assert processor.grid_of(*size) == grid
    pixels = processor.pixels_of(image)
    assert pixels.shape == (1, 3, grid[0] * 8, grid[1] * 8)
    width, height = kept
    inner = pixels[0, :, :height, :width].astype(int)
    assert np.abs(inner - resized(image, kept, "bicubic")).max() <= 1
    assert not pixels[0, :, height:].any() and not pixels[0, :, :, width:].any()
    assert processor.placeholder(grid) == "<|media_pad|>" * (grid[0] * grid[1])


def test_low_detail_of_kimi_has_at_most_1024_patches() -> None:
    rows, columns = kimi().grid_of(4000, 3000, "low")
    assert 200 < rows * columns <= 280  # what fills the last tokens comes on top


def write(folder: Path, model: dict[str, Any], processor: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(model))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


SCOUT = {
    "model_type": "llama4",
    "image_token_index": 92,
    "vision_config": {"image_size": 336, "patch_size": 14, "pixel_shuffle_ratio": 0.5},
}
SCOUT_PROCESSOR = {
    "image_processor_type": "Llama4ImageProcessorFast",
    "size": {"height": 336, "width": 336},
    "max_patches": 16,
    "resample": 2,
    "crop_size": None,
    "do_center_crop": None,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "rescale_factor": 0.00392156862745098,
}
KIMI = {"model_type": "kimi_k25", "media_placeholder_token_id": 605, "vision_config": {}}
MEDIA = {
    "in_patch_limit": 16_384,
    "patch_size": 14,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "merge_kernel_size": 2,
    "fixed_output_tokens": None,
    "patch_limit_on_one_side": 512,
    "sample_fps": 2.0,
}


def test_published_files_are_read(tmp_path: Path) -> None:
    scout = read_image_config(write(tmp_path, SCOUT, SCOUT_PROCESSOR))
    assert isinstance(scout, Llama4Config)
    assert (scout.tile_size, scout.tokens_per_tile, scout.max_tiles) == (336, 144, 16)
    assert scout.image_token_id == 92
    found = read_image_config(write(tmp_path, KIMI, {"media_proc_cfg": MEDIA}))
    assert isinstance(found, KimiConfig)
    assert (found.token_size, found.max_patches, found.image_token_id) == (28, 16_384, 605)
    assert found.pixel_shape((2, 3)) == (1, 3, 56, 84)
    text = {"model_type": "kimi_k25"}
    assert read_image_config(write(tmp_path, text, {"media_proc_cfg": MEDIA})) is None


@pytest.mark.parametrize(
    ("model", "processor", "reason"),
    [
        (SCOUT, {**SCOUT_PROCESSOR, "resample": 3}, "resample must be 2, bilinear"),
        (SCOUT, {**SCOUT_PROCESSOR, "size": {"height": 448, "width": 448}}, "size 448 x 448"),
        (SCOUT, {**SCOUT_PROCESSOR, "max_patches": 64}, "max_patches"),
        (SCOUT, {**SCOUT_PROCESSOR, "image_std": [1.0, 1.0, 1.0]}, "image_std"),
        (KIMI, {"media_proc_cfg": {**MEDIA, "fixed_output_tokens": 64}}, "fixed_output_tokens"),
        (KIMI, {"media_proc_cfg": {**MEDIA, "image_mean": [0.1, 0.5, 0.5]}}, "image_mean"),
        (KIMI, {"patch_size": 14}, "media_proc_cfg"),
    ],
)
def test_other_processors_are_refused(
    tmp_path: Path, model: dict[str, Any], processor: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_image_config(write(tmp_path, model, processor))

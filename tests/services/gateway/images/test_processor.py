"""The processor makes the pixels and the prompts of transformers' own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs
from PIL import Image
from tokenizers import Tokenizer

from services.gateway.images.config import read_image_config
from services.gateway.images.families.idefics3 import Idefics3Processor
from services.gateway.images.families.idefics3_config import Idefics3Config
from services.gateway.images.processed import image_hash
from services.gateway.images.resizing import in_rgb
from services.gateway.text.model_files import ModelFiles
from shared.errors import ConfigError
from tests.support.services.vision_dir import PREPROCESSOR, TILE, write_vision_dir

SIZES = [
    (1, 1),
    (32, 32),
    (33, 31),
    (200, 150),
    (90, 251),
    (128, 128),
    (500, 7),
    (3, 900),
    (64, 96),
]


@pytest.fixture(scope="module")
def vision_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_dir(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def config(vision_dir: Path) -> Idefics3Config:
    found = read_image_config(vision_dir)
    assert isinstance(found, Idefics3Config)
    return found


def drawn(width: int, height: int, mode: str = "RGB") -> Image.Image:
    """A picture whose pixels all differ from their neighbours'."""
    rng = np.random.default_rng(width * 1000 + height)
    bands = len(Image.new(mode, (1, 1)).getbands())
    shape = (height, width) if bands == 1 else (height, width, bands)
    return Image.fromarray(rng.integers(0, 256, shape, np.uint8), mode)


def test_processors_that_transformers_5_writes_into_one_file_are_found(
    config: Idefics3Config, tmp_path: Path
) -> None:
    """They have priority over an older file beside them."""
    path = write_vision_dir(tmp_path)
    older = path / "preprocessor_config.json"
    both = {"processor_class": "SmolVLMProcessor", "image_processor": json.loads(older.read_text())}
    (path / "processor_config.json").write_text(json.dumps(both))
    older.write_text(json.dumps({**PREPROCESSOR, "image_mean": [0.1, 0.2, 0.3]}))
    found = read_image_config(path)
    assert isinstance(found, Idefics3Config)
    assert structs.replace(found, digest=config.digest) == config
    older.unlink()
    assert read_image_config(path) == found
    (path / "processor_config.json").write_text('{"image_seq_len": 64}')
    assert read_image_config(path) is None


@pytest.mark.parametrize("is_split", [True, False])
@pytest.mark.parametrize("family", ["Idefics3", "SmolVLM"])
def test_pixels_are_those_of_transformers(
    config: Idefics3Config, family: str, is_split: bool
) -> None:
    module = pytest.importorskip(
        f"transformers.models.{family.lower()}.image_processing_pil_{family.lower()}"
    )
    given = {name: PREPROCESSOR[name] for name in ("size", "max_image_size", "resample")}
    theirs = getattr(module, f"{family}ImageProcessorPil")(
        **given, do_normalize=False, do_rescale=False, do_image_splitting=is_split
    )
    ours = Idefics3Processor(structs.replace(config, is_split=is_split))
    for size in SIZES:
        image = drawn(*size)
        expected = theirs(image, return_tensors="np", return_row_col_info=True)
        grid = ours.grid_of(*size)
        pixels = ours.pixels_of(image)
        assert grid == (expected["rows"][0][0], expected["cols"][0][0]), size
        assert pixels.shape == expected["pixel_values"][0].shape, size
        assert np.abs(pixels.astype(int) - expected["pixel_values"][0].astype(int)).max() <= 1, size


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "CMYK", "1", "I;16"])
def test_modes_become_rgb_as_in_transformers(mode: str) -> None:
    transforms = pytest.importorskip("transformers.image_transforms")
    if mode == "P":
        image = drawn(40, 30).quantize(16)
        image.info["transparency"] = 3
    elif mode == "I;16":
        image = Image.fromarray(np.arange(1200, dtype=np.uint16).reshape(30, 40) * 50)
        levels = np.asarray(in_rgb(image))[..., 0]
        assert levels.min() == 0 and levels.max() == 1199 * 50 >> 8  # transformers clips it
        return
    else:
        image = drawn(40, 30, mode) if mode != "1" else drawn(40, 30, "L").convert("1")
    expected = transforms.convert_to_rgb(image, return_numpy=True)
    assert np.array_equal(np.asarray(in_rgb(image)), expected)


@pytest.mark.parametrize("grid", [(0, 0), (1, 2), (3, 4)])
def test_placeholders_are_those_of_transformers(
    vision_dir: Path, config: Idefics3Config, grid: tuple[int, int]
) -> None:
    processing = pytest.importorskip("transformers.models.smolvlm.processing_smolvlm")
    text = processing.get_image_prompt_string(
        *grid,
        4,
        image_token="<image>",
        fake_token_around_image="<fake_token_around_image>",
        global_image_token="<global-img>",
    )
    assert Idefics3Processor(config).placeholder(grid) == text
    tokenizer = Tokenizer.from_file(str(vision_dir / "tokenizer.json"))
    count = tokenizer.encode(text).ids.count(tokenizer.token_to_id("<image>"))
    assert count == 4 * (grid[0] * grid[1] + 1)


def test_low_detail_is_one_tile(config: Idefics3Config) -> None:
    ours = Idefics3Processor(config)
    assert ours.grid_of(1000, 800) == (4, 4)
    assert ours.grid_of(1000, 800, "low") == (0, 0)
    assert ours.pixels_of(drawn(1000, 800), "low").shape == (1, 3, TILE, TILE)


def test_hash_differs_by_one_level_grid_configuration_and_weights(config: Idefics3Config) -> None:
    pixels = Idefics3Processor(config).pixels_of(drawn(60, 60))
    other = pixels.copy()
    other[0, 0, 0, 0] ^= 1
    found = {
        image_hash(pixels, (2, 2), config, "a"),
        image_hash(other, (2, 2), config, "a"),
        image_hash(pixels, (1, 4), config, "a"),
        image_hash(pixels, (2, 2), config, "b"),
        image_hash(pixels, (2, 2), structs.replace(config, digest=b"other"), "a"),
    }
    assert len(found) == 5


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"resample": 3}, "resample must be 1"),
        ({"max_image_size": {"longest_edge": 64}}, "max_image_size 64 is not"),
        ({"do_rescale": False}, "do_rescale must be true"),
        ({"image_mean": [0.4, 0.5, 0.5]}, "image_mean"),
        ({"size": {"shortest_edge": 3}}, "longest_edge"),
        ({"size": {"longest_edge": 17 * TILE}}, "16 tiles in a row"),
    ],
)
def test_other_processors_are_refused(
    tmp_path: Path, changes: dict[str, object], reason: str
) -> None:
    path = write_vision_dir(tmp_path)
    (path / "preprocessor_config.json").write_text(json.dumps({**PREPROCESSOR, **changes}))
    with pytest.raises(ConfigError, match=reason):
        read_image_config(path)
    assert ModelFiles(path).images is None  # its text is served

"""The image encoders of Llama 4 and Kimi K2.5 against transformers, and their configs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from shared.engine.models.checkpoint_config import read_config
from shared.engine.models.vision import kimi, llama4
from shared.engine.planning.stored_weights import read_stored
from shared.engine.planning.vision_tensors import vision_tensors
from shared.engine.vision.load_encoder import LoadedEncoder, load_encoder
from shared.errors import CheckpointError
from tests.shared.engine.planning.sparse import KIMI
from tests.support.engine.vision.seeing_models import (
    change_config,
    image,
    kimi_vectors,
    llama4_vectors,
    write_kimi,
    write_llama4,
)
from tests.support.engine.vision.vision_models import picture

MAX_RMS = 5e-6
# rows and columns of tokens: the learned positions' own grid, one token, tall, wide
GRIDS = [(3, 3), (1, 1), (5, 2), (2, 17)]
FAMILIES = {"llama4": write_llama4, "kimi": write_kimi}


class Written:
    def __init__(self, folder: Path, write: Callable[[Path], PreTrainedModel]) -> None:
        self.folder = folder
        self.model = write(folder)
        self.config = read_config(folder)

    def encoder(self, dtype: str = "float32") -> LoadedEncoder:
        assert self.config.vision is not None
        return load_encoder(self.folder, self.config.vision, dtype)


@pytest.fixture(scope="module", params=FAMILIES)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory.mktemp(request.param), FAMILIES[request.param])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory.mktemp("llama4"), write_llama4)


@pytest.fixture(scope="module")
def moonvit(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory.mktemp("kimi"), write_kimi)


def rms(found: bytes, expected: torch.Tensor) -> float:
    """Returns the error, in parts of the vectors' spread where that is more than 1."""
    spread = float(expected.std())
    assert spread > 0.02
    error = np.frombuffer(found, dtype=np.float32) - expected.numpy().reshape(-1)
    return float(np.sqrt((error**2).mean())) / max(1.0, spread)


def test_tiles_of_llama4_equal_transformers(llama: Written) -> None:
    pixels = picture(1, (1, 2)).pixels
    found = b"".join(map(llama.encoder().encode_tile, pixels))
    assert rms(found, llama4_vectors(llama.model, pixels)) <= MAX_RMS


@pytest.mark.parametrize("grid", GRIDS)
def test_images_of_kimi_equal_transformers(moonvit: Written, grid: tuple[int, int]) -> None:
    pixels = image(1, grid).pixels
    found = moonvit.encoder().encode_tile(pixels[0])
    assert rms(found, kimi_vectors(moonvit.model, pixels)) <= MAX_RMS


def test_an_image_as_tall_as_another_is_wide_has_other_vectors(moonvit: Written) -> None:
    """Rows and columns rotate unlike pairs: a blind encoder would give the same vectors."""
    encoder, pixels = moonvit.encoder(), image(1, (2, 3)).pixels[0]
    turned = encoder.encode_tile(pixels.transpose(0, 2, 1))
    vectors = np.frombuffer(encoder.encode_tile(pixels), np.float32).reshape(2, 3, -1)
    other = np.frombuffer(turned, np.float32).reshape(3, 2, -1).transpose(1, 0, 2)
    assert not np.allclose(vectors, other, atol=1e-3)


def test_headers_tell_whether_the_encoder_is_complete(written: Written) -> None:
    stored = load_file(written.folder / "model.safetensors")
    expected = vision_tensors(written.config.vision)
    assert {name: tuple(stored[name].shape) for name in expected} == expected
    beside = {name for name in stored if not name.startswith("language_model.")}
    assert beside == expected.keys()
    assert read_stored(written.folder, written.config).num_tensors > len(expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_what_was_encoded_before(written: Written, dtype: str) -> None:
    encoder = written.encoder(dtype)
    tiles = picture(3, (1, 1)).pixels
    alone = [encoder.encode_tile(tile) for tile in tiles]
    assert alone[::-1] == [encoder.encode_tile(tile) for tile in tiles[::-1]]


def test_published_names_of_kimi_are_read() -> None:
    published = {
        "vt_hidden_size": 1152,
        "vt_intermediate_size": 4304,
        "vt_num_hidden_layers": 27,
        "vt_num_attention_heads": 16,
        "init_pos_emb_height": 32,
        "init_pos_emb_width": 48,
        "init_pos_emb_time": 4,
        "merge_kernel_size": [2, 2],
        "projector_ln_eps": 1e-4,
    }
    given = {**KIMI, "vision_config": published, "media_placeholder_token_id": 7}
    vision = kimi.configure(given).vision
    assert vision is not None
    assert (vision.position_rows, vision.position_columns) == (32, 48)
    assert (vision.projector_eps, vision.image_token_id, vision.output_size) == (1e-4, 7, 7168)
    assert kimi.configure({**KIMI, "vision_config": None}).vision is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
        ({"num_attention_heads": 5}, "not a multiple of 5 heads"),
        ({"num_attention_heads": 8}, "multiples of 4"),
        ({"patch_size": 5}, "squares of 2 patches of 5"),
        ({"pixel_shuffle_ratio": 0.4}, "pixel_shuffle_ratio 0.4"),
        ({"intermediate_size": 100}, "intermediate_size 100"),
        ({"num_channels": 1}, "1 channels"),
    ],
)
def test_an_encoder_of_llama4_that_is_not_served_is_refused(
    llama: Written, changes: dict[str, Any], reason: str
) -> None:
    given = json.loads((llama.folder / "config.json").read_text())
    given["vision_config"] |= changes
    with pytest.raises(CheckpointError, match=reason):
        llama4.configure(given)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"merge_kernel_size": [2, 1]}, "only squares"),
        ({"mm_projector_type": "mlp"}, "mm_projector_type 'mlp'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ],
)
def test_an_encoder_of_kimi_that_is_not_served_is_refused(
    moonvit: Written, changes: dict[str, Any], reason: str
) -> None:
    given = json.loads((moonvit.folder / "config.json").read_text())
    given["vision_config"] |= changes
    with pytest.raises(CheckpointError, match=reason):
        kimi.configure(given)


def test_an_image_token_outside_the_vocabulary_is_refused(tmp_path: Path, llama: Written) -> None:
    (tmp_path / "config.json").write_text((llama.folder / "config.json").read_text())
    change_config(tmp_path, image_token_index=199)
    with pytest.raises(CheckpointError, match="image_token_index 199"):
        read_config(tmp_path)

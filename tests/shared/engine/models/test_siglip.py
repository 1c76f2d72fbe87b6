"""The image encoder against transformers, for tiles of every form."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.engine.executors.cuda.cuda_device import CudaDevice
from shared.engine.models.checkpoint_config import read_config
from shared.engine.models.vision.siglip import SiglipEncoder
from shared.engine.planning.memory_plan import plan_memory
from shared.engine.planning.stored_weights import read_stored
from shared.engine.planning.vision_tensors import encoder_bytes, vision_tensors
from shared.engine.vision.load_encoder import LoadedEncoder, PixelFields, load_encoder
from shared.errors import CheckpointError
from tests.shared.engine.executors.cuda.fake_device import INDEX, FakeDriver
from tests.support.engine.vision.vision_models import TILE, picture, write_smolvlm
from tests.support.threads import computing_threads

MAX_RMS = 5e-6
ODD_TILES = {"tall": (48, 16), "wide": (16, 128), "one square": (16, 16), "large": (64, 64)}


def shuffled(x: torch.Tensor, height: int, width: int, scale: int) -> torch.Tensor:
    """[h · w, hidden] -> transformers' pixel shuffle, which takes squares alone, for any grid."""
    x = x.view(height, width // scale, -1).transpose(0, 1)
    x = x.reshape(width // scale, height // scale, -1).transpose(0, 1)
    return x.reshape(height * width // scale**2, -1)


@pytest.mark.parametrize("architecture", ["SmolVLM", "Idefics3"])
def test_encoder_equals_transformers(tmp_path: Path, architecture: str) -> None:
    model = write_smolvlm(tmp_path, f"{architecture}ForConditionalGeneration")
    encoder = load_encoder(tmp_path, read_config(tmp_path).vision, "float32")
    pixels = picture(1, (2, 3)).pixels
    values = torch.from_numpy(pixels).float() / 255 * 2 - 1
    with torch.no_grad():
        expected = model.model.connector(model.model.vision_model(values).last_hidden_state)
    found = np.frombuffer(b"".join(map(encoder.encode_tile, pixels)), dtype=np.float32)
    error = found - expected.numpy().reshape(-1)
    assert float(np.sqrt((error**2).mean())) <= MAX_RMS
    assert float(expected.std()) > 0.1


def test_headers_tell_whether_the_encoder_is_complete(tmp_path: Path) -> None:
    write_smolvlm(tmp_path)
    config = read_config(tmp_path)
    own = SiglipEncoder(config.vision, dtype=torch.float32).weight_destinations()
    assert vision_tensors(config.vision) == {name: tuple(t.shape) for name, t in own.items()}
    assert read_stored(tmp_path, config).num_tensors > len(own)
    num_bytes = sum(t.nbytes for t in own.values())
    assert encoder_bytes(config.vision, 4) == num_bytes
    text = msgspec.structs.replace(config, vision=None)
    planned = [plan_memory(each, tp=2, pp=1, item_bytes=4) for each in (config, text)]
    more = [a.weight_bytes - b.weight_bytes for a, b in zip(*planned, strict=True)]
    assert more == [num_bytes, 0]
    path, name = tmp_path / "model.safetensors", "model.vision_model.post_layernorm.bias"
    tensors = load_file(path)
    save_file({**tensors, name: torch.zeros(3)}, path)
    with pytest.raises(CheckpointError, match=r"post_layernorm\.bias has shape \[3\]"):
        read_stored(tmp_path, config)
    del tensors[name]
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"post_layernorm\.bias is missing"):
        read_stored(tmp_path, config)


@pytest.mark.parametrize("shape", ODD_TILES.values(), ids=ODD_TILES)
def test_tiles_of_other_sizes_take_positions_at_the_same_fractions(
    tmp_path: Path, shape: tuple[int, int]
) -> None:
    """15 patches a side: fractions of these are not exact in FP32."""
    vision = {"image_size": 120, "patch_size": 8, "num_attention_heads": 4}
    model = write_smolvlm(tmp_path, vision=vision, scale_factor=1)
    config = read_config(tmp_path).vision
    own = SiglipEncoder(config, dtype=torch.float32)
    weights = model.model.state_dict()
    for name, tensor in own.weight_destinations().items():
        tensor.copy_(weights[name])
    values = torch.randn(2, 3, *shape)
    height, width = shape[0] // 8, shape[1] // 8
    with torch.no_grad():
        hidden = model.model.vision_model(values).last_hidden_state
        cut = torch.stack([shuffled(each, height, width, 1) for each in hidden])
        expected = model.model.connector.modality_projection(cut).flatten(0, 1)
    assert float((own(values) - expected).pow(2).mean().sqrt()) <= MAX_RMS


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_of_a_tile_depend_neither_on_others_nor_on_threads(tmp_path: Path, dtype: str) -> None:
    vision = {"hidden_size": 192, "intermediate_size": 768, "image_size": 128, "patch_size": 8}
    write_smolvlm(tmp_path, vision=vision)
    encoder = load_encoder(tmp_path, read_config(tmp_path).vision, dtype)
    tiles = np.random.default_rng(0).integers(0, 256, (3, 3, 128, 128), dtype=np.uint8)
    alone = []
    for num_threads in (1, 2, 3):
        with computing_threads(num_threads):
            alone.append([encoder.encode_tile(tile) for tile in tiles])
    assert alone[0] == alone[1] == alone[2]
    assert alone[0][::-1] == [encoder.encode_tile(tile) for tile in tiles[::-1]]


FIELDS = '{"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.25, 1.0]}'


@pytest.mark.parametrize(
    ("file", "config"),
    [
        ("preprocessor_config.json", FIELDS),
        ("preprocessor_config.json", f'{{"media_proc_cfg": {FIELDS}}}'),
        ("processor_config.json", f'{{"image_processor": {FIELDS}}}'),
    ],
)
def test_pixels_have_the_values_of_the_processor(tmp_path: Path, file: str, config: str) -> None:
    write_smolvlm(tmp_path)
    (tmp_path / file).write_text(config)
    encoder = load_encoder(tmp_path, read_config(tmp_path).vision, "float32")
    tile = np.full((3, TILE, TILE), 255, dtype=np.uint8)
    assert encoder.normalized(tile)[:, 0, 0].tolist() == pytest.approx([1.8, 3.2, 0.7])
    (tmp_path / file).write_text(config.replace("[0.1, 0.2, 0.3]", "null"))
    with pytest.raises(CheckpointError, match=file):
        load_encoder(tmp_path, read_config(tmp_path).vision, "float32")


@pytest.mark.parametrize(
    ("vision", "message"),
    [
        ({"num_channels": 1}, "1 channels"),
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
        ({"num_attention_heads": 3}, "not a multiple of 3 heads"),
        ({"patch_size": 7}, "squares of 2 patches of 7"),
    ],
)
def test_an_encoder_that_is_not_served_is_refused(tmp_path, vision, message) -> None:
    write_smolvlm(tmp_path)
    path = tmp_path / "config.json"
    config = msgspec.json.decode(path.read_bytes())
    config["vision_config"].update(vision)
    path.write_bytes(msgspec.json.encode(config))
    with pytest.raises(CheckpointError, match=message):
        read_config(tmp_path)


def test_tiles_on_cuda_follow_the_weights_on_a_bound_thread(tmp_path: Path) -> None:
    """On a stream beside the steps'. A new thread starts on device 0."""
    write_smolvlm(tmp_path)
    own, driver = load_encoder(tmp_path, read_config(tmp_path).vision, "float32"), FakeDriver()
    cuda = CudaDevice(INDEX, torch.device("cpu"), driver)
    encoder = LoadedEncoder(own._model, PixelFields(), cuda.tensors_on, cuda=cuda)
    assert driver.copies == driver.marks != []
    tile = picture(1).pixels[0]
    with ThreadPoolExecutor(1, "tiles", initializer=encoder.init_thread) as thread:
        assert thread.submit(encoder.encode_tile, tile).result() == own.encode_tile(tile)
        thread.submit(encoder.check).result()
    assert driver.bound["tiles_0"] == INDEX
    assert driver.copies[1:] == ["begin", "end", "synchronize"]
    assert not driver.calls  # the device may be captured meanwhile

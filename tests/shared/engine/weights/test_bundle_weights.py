"""An engine loads a bundle like a checkpoint: with the same tensors, logits and revision."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.engine.codec.compress import compress_folder
from shared.engine.codec.manifest import MANIFEST
from shared.engine.codec.safetensors_layout import map_safetensors
from shared.engine.codec.savings_report import rows_by_kind, tensors_of, total_row
from shared.engine.executors.load import load_executor
from shared.engine.weights.load import open_checkpoint, weights_digest
from shared.engine.weights.weight_source import read_tensor
from shared.errors import CheckpointError
from tests.shared.engine.codec.folders import Silent
from tests.support.engine.checkpoints import write_llama
from tests.support.engine.steps import Blocks, prefill
from tests.support.grids import in_short_run

PROMPT = list(range(5, 60))
SHAPE = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


def _bundled(folder: Path, target: Path, **options) -> Path:
    write_llama(folder, **SHAPE, **options)
    compress_folder(folder, target, Silent())
    return target


def _logits(folder: Path, dtype: str = "bfloat16") -> tuple[torch.Tensor, str]:
    executor = load_executor(folder, dtype=dtype, kv_cache_bytes=1 << 20)
    return prefill(executor, Blocks(executor.num_blocks).line(PROMPT), 64), executor.revision


@pytest.mark.parametrize(
    ("dtype", "is_tied"),
    in_short_run(
        [("bfloat16", True), ("float32", False)],
        product(("bfloat16", "float16", "float32"), (False, True)),
    ),
)
def test_logits_and_revision_equal_the_uncompressed_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, is_tied: bool
) -> None:
    uncompressed = tmp_path / "plain"
    options = {"dtype": getattr(torch, dtype), "tie_word_embeddings": is_tied}
    bundle = _bundled(uncompressed, tmp_path / "bundle", max_shard_size="100KB", **options)
    assert len(list(bundle.glob("*.hearth.safetensors"))) > 1
    expected, revision = _logits(uncompressed, dtype)
    for cache in ("cache", "cache/config.json"):  # mapped weights, then private weights
        monkeypatch.setenv("HEARTH_CACHE_DIR", str(tmp_path / cache))
        (tmp_path / "cache").mkdir(exist_ok=True)
        (tmp_path / "cache" / "config.json").touch()
        logits, of_bundle = _logits(bundle, dtype)
        assert torch.equal(logits, expected)
        assert of_bundle == revision


@pytest.fixture(scope="module")
def one_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """An uncompressed folder and its bundle; a test that changes them copies them first."""
    folder = tmp_path_factory.mktemp("one_file")
    bundle = _bundled(folder / "plain", folder / "bundle", dtype=torch.bfloat16)
    yield folder / "plain", bundle


def test_tensors_equal_those_of_the_uncompressed_file(one_file: tuple[Path, Path]) -> None:
    uncompressed, bundle = one_file
    with open_checkpoint(uncompressed) as expected, open_checkpoint(bundle) as found:
        assert found.names() == expected.names()
        for name in expected.names():
            tensor, original = read_tensor(found, name), read_tensor(expected, name)
            assert (tensor.dtype, tensor.shape) == (original.dtype, original.shape)
            assert torch.equal(tensor.view(torch.int16), original.view(torch.int16))
            assert found.content(name) == expected.content(name)
            assert found.path(name) == bundle / "model.hearth.safetensors"
        assert weights_digest(found, b"x") == weights_digest(expected, b"x")
        assert set(found.files()) == {bundle / MANIFEST, bundle / "model.hearth.safetensors"}


def _copied(one_file: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(one_file[1], tmp_path / "bundle"))


def test_corrupt_or_missing_shard_is_named(one_file: tuple[Path, Path], tmp_path: Path) -> None:
    bundle = _copied(one_file, tmp_path)
    path = bundle / "model.hearth.safetensors"
    content = path.read_bytes()
    last = "model.norm.weight"  # the tensors are in the order of the file
    for corrupt, message in (
        (content[:-1] + bytes([content[-1] ^ 1]), f"tensor {last}: damaged: its checksum"),
        (content[:-1], f"tensor {last}.whole is cut off"),
        (content[:100], "its header is cut off"),
        ((one_file[0] / "model.safetensors").read_bytes(), "there is no .*\\.sign_mantissa"),
    ):
        path.write_bytes(corrupt)
        with pytest.raises(CheckpointError, match=f"{path}: .*{message}") as caught:
            _logits(bundle)
        assert "\n" not in caught.value.message
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{path}: no such file"):
        _logits(bundle)


def test_index_naming_a_foreign_shard_or_tensor_is_rejected(
    one_file: tuple[Path, Path], tmp_path: Path
) -> None:
    bundle = _copied(one_file, tmp_path)
    foreign = '{"weight_map": {"a": "b.safetensors", "c": "model.safetensors"}}'
    (bundle / "model.safetensors.index.json").write_text(foreign)
    with pytest.raises(CheckpointError, match=r"b\.hearth\.safetensors: not a shard of this"):
        _logits(bundle)
    index = '{"weight_map": {"a": "model.safetensors"}}'
    (bundle / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"model\.hearth\.safetensors: tensor a of .*missing"):
        _logits(bundle)


def test_savings_report_has_a_row_for_each_layer_kind(tmp_path: Path) -> None:
    write_llama(tmp_path / "plain", **SHAPE, dtype=torch.bfloat16)
    manifest = compress_folder(tmp_path / "plain", tmp_path / "bundle", Silent())
    tensors = tensors_of(manifest)
    rows = {row.kind: row for row in rows_by_kind(tensors)}
    assert {"model.embed_tokens", "lm_head", "mlp.up_proj", "input_layernorm"} <= set(rows)
    up = rows["mlp.up_proj"]
    assert (up.num_tensors, up.num_coded, up.num_weights) == (2, 2, 2 * 128 * 64)
    assert up.num_raw_bytes == up.num_weights < up.entropy_bytes < up.num_stored_bytes
    assert 10 < up.entropy_bits_per_weight < up.bits_per_weight < 11.5
    assert 0 < up.excess_over_entropy < 0.1
    norm = rows["input_layernorm"]
    assert (norm.num_coded, norm.saved_share, norm.bits_per_weight) == (0, 0.0, 16.0)
    assert norm.excess_over_entropy == 0
    total = total_row(tensors)
    assert total.num_bytes == sum(row.num_bytes for row in rows.values())
    assert total.num_stored_bytes == sum(row.num_stored_bytes for row in rows.values())


def _with_tensor(folder: Path, name: str, tensor: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | {name: tensor}, path)


def _corrupt_tensor(bundle: Path, tensor: str) -> None:
    """Flips a bit of the tensor, so that decoding it fails."""
    path = bundle / "model.hearth.safetensors"
    header = map_safetensors(path).header
    _, end = next(
        span.data_offsets for name, span in header.spans.items() if name.startswith(f"{tensor}.")
    )
    content = bytearray(path.read_bytes())
    content[header.data_start + end - 1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.norm.weight", torch.zeros(1 << 20).bfloat16(), "has shape \\[1048576\\], the"),
        ("model.norm.weight", torch.zeros(64, dtype=torch.int8), "is I8; only BF16, F16 and F32"),
        ("lm_head.weight", torch.zeros(1 << 20).bfloat16(), "has shape \\[1048576\\], the"),
    ],
)
def test_unfit_tensor_is_rejected_before_decoding(
    tmp_path: Path, name: str, tensor: torch.Tensor, message: str
) -> None:
    """The tensor is also corrupt: decoding it would give another error."""
    uncompressed, bundle = tmp_path / "plain", tmp_path / "bundle"
    write_llama(uncompressed, **SHAPE, dtype=torch.bfloat16, tie_word_embeddings=True)
    _with_tensor(uncompressed, name, tensor)
    compress_folder(uncompressed, bundle, Silent())
    _corrupt_tensor(bundle, name)
    with pytest.raises(CheckpointError, match=f"tensor {name} {message}"):
        _logits(bundle)

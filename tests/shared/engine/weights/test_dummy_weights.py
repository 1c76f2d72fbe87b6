"""Weights computed from the config alone: the same on every load, with finite, varied logits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

from shared.engine.executors.load import load_executor
from shared.engine.executors.local_executor import LocalExecutor
from shared.engine.weights import dummy_weights
from shared.engine.weights.dummy_weights import DummyTensors
from shared.engine.weights.weight_source import read_tensor
from shared.errors import CheckpointError, ConfigError
from tests.support.engine.checkpoints import write_model
from tests.support.engine.steps import Blocks, generate, prefill

PROMPT = list(range(5, 60))
FAMILIES = ["LlamaForCausalLM", "Gemma2ForCausalLM", "Qwen2ForCausalLM", "Phi3ForCausalLM"]


def only_config(folder: Path, architecture: str = "LlamaForCausalLM", **options: object) -> Path:
    """A folder with nothing but `config.json`."""
    write_model(folder, architecture, **options)
    for path in folder.iterdir():
        if path.name != "config.json":
            path.unlink()
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    return folder


def load(folder: Path, **options: object) -> LocalExecutor:
    chosen = {"dtype": "float32", "kv_cache_bytes": 1 << 20, "load_format": "dummy", **options}
    return load_executor(folder, **chosen)


def tokens(executor: LocalExecutor) -> list[int]:
    return generate(executor, Blocks(executor.num_blocks).line(PROMPT, room=8), 8)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_folder_with_only_a_config_gives_tokens(tmp_path: Path, architecture: str) -> None:
    executor = load(only_config(tmp_path, architecture))
    logits = prefill(executor, Blocks(executor.num_blocks).line(PROMPT), 64)
    assert bool(logits.isfinite().all())
    assert len(set(logits.argmax(-1).tolist())) > 5  # they depend on the input
    assert 0.1 < float(logits.std()) < 10


def test_repeated_loads_have_equal_revision_and_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = only_config(tmp_path / "model")
    first, second = load(folder), load(folder)
    monkeypatch.setenv("HEARTH_CACHE_DIR", str(tmp_path / "empty"))
    third = load(folder)  # built again, not mapped
    assert first.revision == second.revision == third.revision
    assert tokens(first) == tokens(second) == tokens(third)


def test_dummy_revision_differs_from_that_of_real_weights(tmp_path: Path) -> None:
    """The weights differ, too, although the cache of shared weights has both."""
    write_model(tmp_path, "LlamaForCausalLM")
    real, dummy = load(tmp_path, load_format="auto"), load(tmp_path)
    assert real.revision != dummy.revision
    assert tokens(real) != tokens(dummy)


def test_new_formula_version_does_not_use_the_old_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = only_config(tmp_path)
    first = load(folder)
    monkeypatch.setattr(dummy_weights, "VERSION", 2)
    second = load(folder)
    assert first.revision != second.revision
    assert tokens(first) != tokens(second)


def test_revision_depends_on_the_config(tmp_path: Path) -> None:
    one = load(only_config(tmp_path / "one"))
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.001}))
    assert load(tmp_path / "other").revision != one.revision


@pytest.mark.parametrize("weights", ["dense", "compressed"])
def test_dense_and_compressed_give_the_same_tokens(tmp_path: Path, weights: str) -> None:
    folder = only_config(tmp_path, hidden_size=64, intermediate_size=128, head_dim=16)
    expected = tokens(load(folder, dtype="bfloat16"))
    assert tokens(load(folder, dtype="bfloat16", weights=weights)) == expected


def test_formula_matches_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference is numpy with 64-bit words, which do not wrap; the tensor has many chunks."""
    shape, name = (7, 100), "model.layers.0.mlp.down_proj.weight"
    tensors = DummyTensors(Path("model"), {name: torch.empty(shape)})
    monkeypatch.setattr(dummy_weights, "CHUNK_ELEMENTS", 64)
    key = xxhash.xxh3_64_intdigest(f"dummy/v1/seed0/{name}".encode()) & 0xFFFFFFFF
    word = (np.arange(700, dtype=np.uint64) * 0x9E3779B9 + key) & 0xFFFFFFFF
    word = ((word ^ (word >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    word = ((word ^ (word >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    word ^= word >> 16
    total = sum((word >> shift) & 255 for shift in (0, 8, 16, 24)).astype(np.float32)
    std = (4 * (256**2 - 1) / 12) ** 0.5
    expected = (total - np.float32(510)) * np.float32(0.1 / std)
    assert torch.equal(read_tensor(tensors, name), torch.from_numpy(expected).view(shape))


def test_elements_are_nearly_normal_and_depend_on_name_and_seed() -> None:
    tensors_by_name = {"a.weight": torch.empty(512, 256), "b.weight": torch.empty(512, 256)}
    first, other = (
        DummyTensors(Path(), tensors_by_name),
        DummyTensors(Path(), tensors_by_name, seed=1),
    )
    made = read_tensor(first, "a.weight")
    assert abs(float(made.mean())) < 0.001
    assert abs(float(made.std()) * 16 - 1) < 0.01
    assert abs(float((made.abs() * 16 < 1).float().mean()) - 0.683) < 0.02
    for another in (read_tensor(first, "b.weight"), read_tensor(other, "a.weight")):
        correlation = torch.corrcoef(torch.stack([made.flatten(), another.flatten()]))[0, 1]
        assert abs(float(correlation)) < 0.02
    assert first.content("a.weight") != other.content("a.weight")


def test_unknown_load_format_is_rejected(tmp_path: Path) -> None:
    folder = only_config(tmp_path)
    with pytest.raises(ConfigError, match="load_format 'gguf' is none of auto, dummy"):
        load(folder, load_format="gguf")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: no such file"):
        load(folder, load_format="auto")

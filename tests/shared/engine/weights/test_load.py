from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.engine.runners.load import load_runner
from shared.engine.runners.model_runner import ModelRunner
from shared.errors import CheckpointError
from tests.shared.engine.support.checkpoints import LLAMA3_ROPE, write_llama
from tests.shared.engine.support.steps import Blocks, prefill

PROMPT = list(range(5, 60))
NORM = "model.layers.1.input_layernorm.weight"


def _load(folder: Path, dtype: str = "float32") -> ModelRunner:
    return load_runner(folder, dtype=dtype, kv_cache_bytes=1 << 20)


def _logits(runner: ModelRunner) -> torch.Tensor:
    return prefill(runner, Blocks(runner.num_blocks).line(PROMPT), 64)


def test_shards_load_like_one_file(tmp_path: Path) -> None:
    write_llama(tmp_path / "one")
    write_llama(tmp_path / "many", max_shard_size="60KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = _load(tmp_path / "one"), _load(tmp_path / "many")
    assert torch.equal(_logits(one), _logits(many))
    assert one.revision == many.revision
    assert len(one.revision) == 32


def test_revision_depends_on_weights_and_config(tmp_path: Path) -> None:
    for name, options in {
        "a": {},
        "weights": {"seed": 1},
        "config": {"rope_parameters": {"rope_type": "default", "rope_theta": 5_000.0}},
    }.items():
        write_llama(tmp_path / name, **options)  # type: ignore[arg-type]
    revisions = {_load(tmp_path / name).revision for name in ("a", "weights", "config")}
    assert len(revisions) == 3


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_sources_are_converted_to_the_compute_dtype(
    tmp_path: Path, source: torch.dtype, dtype: str
) -> None:
    model = write_llama(tmp_path, dtype=source)
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0]
    error = (_logits(_load(tmp_path, dtype)) - expected).pow(2).mean().sqrt()
    assert error < 0.05 * expected.pow(2).mean().sqrt()


def test_old_and_new_config_fields_are_equivalent(tmp_path: Path) -> None:
    write_llama(tmp_path, rope_parameters=LLAMA3_ROPE)
    new = _load(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    config["rope_scaling"] = scaling
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config))
    old = _load(tmp_path)
    assert torch.equal(_logits(new), _logits(old))
    assert new.revision == old.revision


def test_eos_ids_come_from_the_generation_config(tmp_path: Path) -> None:
    write_llama(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 7]}')
    assert _load(tmp_path).eos_token_ids == (0, 7)


def test_saved_rotary_buffer_and_tied_head_copy_are_ignored(tmp_path: Path) -> None:
    write_llama(tmp_path, tie_word_embeddings=True)
    expected = _logits(_load(tmp_path))

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    _edit_tensors(tmp_path, add)
    assert torch.equal(_logits(_load(tmp_path)), expected)


def _edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    edit(tensors)
    save_file(tensors, path)


BAD_TENSORS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "missing": (lambda t: t.pop(NORM), f"tensor {NORM} is missing"),
    "extra": (lambda t: t.update(extra=torch.ones(3)), "tensor extra is not part of the model"),
    "shape": (lambda t: t.update({NORM: torch.ones(7)}), f"tensor {NORM} has shape \\[7\\]"),
    "dtype": (
        lambda t: t.update({NORM: torch.ones(48, dtype=torch.int8)}),
        f"tensor {NORM} is I8",
    ),
}


@pytest.mark.parametrize("kind", BAD_TENSORS)
def test_bad_tensor_is_named(tmp_path: Path, kind: str) -> None:
    write_llama(tmp_path)
    edit, message = BAD_TENSORS[kind]
    _edit_tensors(tmp_path, edit)
    _require_error(tmp_path, message)


@pytest.mark.parametrize("share", [0.9, 0.001, 0.0])
def test_truncated_file_is_named(tmp_path: Path, share: float) -> None:
    write_llama(tmp_path)
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    _require_error(tmp_path, "model.safetensors: invalid safetensors file")


def test_missing_file_or_shard_is_named(tmp_path: Path) -> None:
    write_llama(tmp_path / "one")
    (tmp_path / "one" / "model.safetensors").unlink()
    _require_error(tmp_path / "one", "model.safetensors: no such file")
    write_llama(tmp_path / "many", max_shard_size="60KB")
    shard = min((tmp_path / "many").glob("*.safetensors"))
    shard.unlink()
    _require_error(tmp_path / "many", f"{shard.name}: no such file")


def test_index_that_contradicts_its_shards_is_rejected(tmp_path: Path) -> None:
    write_llama(tmp_path, max_shard_size="60KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    for weight_map, message in (
        ({**index["weight_map"], "ghost": index["weight_map"][NORM]}, "tensor ghost of .* missing"),
        ({**index["weight_map"], NORM: "../up.safetensors"}, "is not a file name"),
        ("nonsense", "Expected `object`"),
    ):
        path.write_text(json.dumps({"weight_map": weight_map}))
        _require_error(tmp_path, message)
    path.write_text("{")
    _require_error(tmp_path, "index.json: Input data was truncated")


BAD_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"architectures": ["MambaForCausalLM"]}, "'MambaForCausalLM' is not supp"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    "rope": ({"rope_parameters": {"rope_type": "mrope"}}, "rope type 'mrope' is not supported"),
    "type": ({"hidden_size": "48"}, "Expected `int`, got `str` - at `\\$.hidden_size`"),
    "zero": ({"num_hidden_layers": 0}, "at `\\$.num_hidden_layers`"),
    "heads": ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 KV heads"),
    "odd head": ({"head_dim": 11}, "head_dim 11 is odd"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config"),
    "shape": ({"vocab_size": 200}, "tensor lm_head.weight has shape \\[199, 48\\]"),
    "untied": ({"tie_word_embeddings": True}, "tensor lm_head.weight is not part of the model"),
}


@pytest.mark.parametrize("kind", BAD_CONFIGS)
def test_bad_config_is_rejected(tmp_path: Path, kind: str) -> None:
    write_llama(tmp_path)
    changes, message = BAD_CONFIGS[kind]
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    _require_error(tmp_path, message)


def test_unreadable_config_is_rejected(tmp_path: Path) -> None:
    write_llama(tmp_path)
    (tmp_path / "generation_config.json").write_text("[1")
    _require_error(tmp_path, "generation_config.json: ")
    (tmp_path / "config.json").write_bytes(b"\xff{")
    _require_error(tmp_path, "config.json: ")


def _require_error(folder: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        _load(folder)
    assert "\n" not in caught.value.message

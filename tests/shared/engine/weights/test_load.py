from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from shared.engine.codec.compress import compress_folder
from shared.engine.executors.load import load_executor
from shared.engine.executors.local_executor import LocalExecutor
from shared.engine.models.checkpoint_config import read_config
from shared.engine.planning.stored_weights import read_stored
from shared.engine.quantize.quantize_folder import quantize_folder
from shared.errors import CheckpointError
from tests.shared.engine.codec.folders import Silent
from tests.support.engine.checkpoints import LLAMA3_ROPE, write_llama
from tests.support.engine.steps import Blocks, prefill

PROMPT = list(range(5, 60))
NORM = "model.layers.1.input_layernorm.weight"


def _load(folder: Path, dtype: str = "float32") -> LocalExecutor:
    return load_executor(folder, dtype=dtype, kv_cache_bytes=1 << 20)


def _logits(executor: LocalExecutor) -> torch.Tensor:
    return prefill(executor, Blocks(executor.num_blocks).line(PROMPT), 64)


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
@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float32", pytest.param("float16", marks=pytest.mark.long)]
)
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


def test_end_ids_come_from_both_configs(tmp_path: Path) -> None:
    write_llama(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 7]}')
    assert _load(tmp_path).eos_token_ids == (0, 7, 2)


def test_saved_rotary_buffer_and_tied_head_copy_are_ignored(tmp_path: Path) -> None:
    write_llama(tmp_path, tie_word_embeddings=True)
    expected = _logits(_load(tmp_path))

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    _edit_tensors(tmp_path, add)
    assert torch.equal(_logits(_load(tmp_path)), expected)


def _without_prefix(tensors: dict[str, torch.Tensor]) -> None:
    for name in list(tensors):
        tensors[name.removeprefix("model.")] = tensors.pop(name)


def _as_base_model(tensors: dict[str, torch.Tensor]) -> None:
    _without_prefix(tensors)
    tensors.pop("lm_head.weight", None)


def _add_unused(tensors: dict[str, torch.Tensor]) -> None:
    tensors["score.weight"] = torch.ones(2, 48)
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(48)
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.ones(3)


ALTERED: dict[str, tuple[dict[str, Any], Callable[[dict[str, torch.Tensor]], Any] | None]] = {
    "base model": ({"tie_word_embeddings": True}, _as_base_model),
    "base model with a head": ({}, _without_prefix),
    "other tensors": ({}, _add_unused),
    "tied, another head": ({"tie_word_embeddings": True}, None),
    "tied, only the head": (
        {"tie_word_embeddings": True},
        lambda tensors: tensors.pop("model.embed_tokens.weight"),
    ),
    "swish": ({"hidden_act": "swish"}, None),
    **{
        f"architectures {names}": ({"architectures": names}, None)
        for names in ([], None, ["LlamaModel"], ["LlamaForSequenceClassification"], ["OwnModel"])
    },
    **{act: ({"hidden_act": act}, None) for act in ("gelu_new", "gelu_fast", "gelu_python_tanh")},
}


def _alter_config(folder: Path, changes: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("kind", ALTERED)
def test_altered_folder_loads_as_in_transformers(tmp_path: Path, kind: str) -> None:
    write_llama(tmp_path)
    changes, edit = ALTERED[kind]
    _alter_config(tmp_path, changes)
    if edit is not None:
        _edit_tensors(tmp_path, edit)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(_logits(_load(tmp_path)), expected, atol=2e-4, rtol=1e-4)
    assert read_stored(tmp_path, read_config(tmp_path)).num_tensors


def test_what_is_left_out_is_one_warning(tmp_path: Path) -> None:
    write_llama(tmp_path)
    _edit_tensors(tmp_path, _add_unused)
    with structlog.testing.capture_logs() as logged:
        _load(tmp_path)
    (warning,) = [line for line in logged if line["log_level"] == "warning"]
    assert (warning["event"], warning["count"]) == ("tensors_not_used", 3)
    assert "score.weight" in warning["first"]


def test_older_index_beside_all_tensors_and_an_empty_quantization_change_nothing(
    tmp_path: Path,
) -> None:
    write_llama(tmp_path)
    expected = _logits(_load(tmp_path))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {NORM: "model-00001-of-00002.safetensors"}}))
    _alter_config(tmp_path, {"quantization_config": {}})
    with structlog.testing.capture_logs() as logged:
        assert torch.equal(_logits(_load(tmp_path)), expected)
    assert [line["event"] for line in logged if line["log_level"] == "warning"] == [
        "index_not_used"
    ]
    compress_folder(tmp_path, tmp_path.with_name("bundle"), Silent())
    assert torch.equal(_logits(_load(tmp_path.with_name("bundle"))), expected)
    index.write_text("{")
    assert torch.equal(_logits(_load(tmp_path)), expected)


@pytest.mark.parametrize("is_tied", [True, False])
def test_base_model_is_quantized_and_compressed(tmp_path: Path, is_tied: bool) -> None:
    """An untied base model has no head: it gives embeddings."""
    write_llama(tmp_path / "full", tie_word_embeddings=True, hidden_size=64, head_dim=16)
    write_llama(tmp_path / "base", tie_word_embeddings=True, hidden_size=64, head_dim=16)
    _edit_tensors(tmp_path / "base", _as_base_model)
    _alter_config(tmp_path / "base", {"tie_word_embeddings": is_tied})
    logits = {}
    for name in ("full", "base"):
        quantize_folder(tmp_path / name, tmp_path / f"{name} int4", "int4", Silent())
        compress_folder(tmp_path / name, tmp_path / f"{name} bundle", Silent())
        for made in ("int4", "bundle"):
            logits[name, made] = _logits(_load(tmp_path / f"{name} {made}"))
    assert torch.equal(logits["full", "int4"], logits["base", "int4"])
    assert torch.equal(logits["full", "bundle"], logits["base", "bundle"])
    assert _load(tmp_path / "base bundle").has_head == is_tied


def test_other_head_of_a_bundle_is_found(tmp_path: Path) -> None:
    write_llama(tmp_path / "full")
    _alter_config(tmp_path / "full", {"tie_word_embeddings": True})
    compress_folder(tmp_path / "full", tmp_path / "bundle", Silent())
    assert not read_config(tmp_path / "bundle").has_tied_embeddings


def _edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    edit(tensors)
    save_file(tensors, path)


BAD_TENSORS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "missing": (lambda t: t.pop(NORM), f"tensor {NORM} is missing"),
    "quantized": (
        lambda t: t.update({NORM.replace("weight", "weight_scale"): torch.ones(3)}),
        f"tensor {NORM}_scale is not part of the model",
    ),
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


@pytest.mark.parametrize("name", ["a\0.safetensors", "../pipe.safetensors"])
def test_config_of_a_folder_whose_index_names_no_file_of_it_is_read(
    tmp_path: Path, name: str
) -> None:
    """Loading the weights reports the index. A pipe would block for ever."""
    folder = tmp_path / "model"
    write_llama(folder, max_shard_size="60KB")
    os.mkfifo(tmp_path / "pipe.safetensors")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    path.write_text(json.dumps({**index, "weight_map": dict.fromkeys(index["weight_map"], name)}))
    assert read_config(folder).has_head
    _require_error(folder, "is not a file name")


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
    "architecture": (
        {"architectures": ["MambaForCausalLM"], "model_type": "mamba"},
        "'MambaForCausalLM' is not served: `hearth models`",
    ),
    "activation": ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    "rope": ({"rope_parameters": {"rope_type": "mrope"}}, "rope type 'mrope' is not supported"),
    "type": ({"hidden_size": "48"}, "Expected `int`, got `str` - at `\\$.hidden_size`"),
    "zero": ({"num_hidden_layers": 0}, "at `\\$.num_hidden_layers`"),
    "heads": ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 KV heads"),
    "odd head": ({"head_dim": 11}, "head_dim 11 is odd"),
    "quantized": ({"quantization_config": {"bits": 4}}, "quantization_config"),
    "shape": ({"vocab_size": 200}, "tensor lm_head.weight has shape \\[199, 48\\]"),
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

"""`hearth quantize`: which weights it rounds, how far, and what it writes beside them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels.reference.dequantize import dequantize_fp8, dequantize_int4
from shared.engine.model_config.formats import Fp8Block, Int4, stored_tensors
from shared.engine.quantize.quantize_folder import quantize_folder
from shared.engine.quantize.round_to_nearest import quantized_tensors
from shared.errors import CheckpointError, ConfigError
from tests.support.engine.checkpoints import write_llama
from tests.support.engine.families import FAMILIES
from tests.support.engine.quantized import NoProgress, edit_tensors, quantize

FORMS = [
    Int4(group=32, is_symmetric=True),
    Int4(group=0, is_symmetric=False),
    Int4(group=64, is_symmetric=False, scale_dtype="F32"),
    Fp8Block(),
]


def dequantized(found: dict[str, Tensor], width: int) -> Tensor:
    if "weight" in found:
        return dequantize_fp8(found["weight"], found["weight_scale_inv"], torch.float32)
    zeros = found.get("weight_zero_point")
    parts = found["weight_packed"], found["weight_scale"], zeros
    return dequantize_int4(*parts, width, torch.float32)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("shape", [(5, 192), (130, 320)], ids=str)
def test_weights_are_rounded_to_the_nearest_code(
    form: Int4 | Fp8Block, shape: tuple[int, int]
) -> None:
    weight = torch.randn(shape)
    weight[1] = 0.0
    found = quantized_tensors(weight, form)
    error = (dequantized(found, shape[1]) - weight).abs()
    if isinstance(form, Int4):
        scale = found["weight_scale"].float().repeat_interleave(form.group or shape[1], 1)
        # Half a step; as much again at the ends of a range whose zero was rounded; the scale's own.
        assert bool((error <= scale * (0.55 if form.is_symmetric else 1.05)).all())
    else:
        assert bool((error <= weight.abs() / 16 + 1e-3).all())
    assert not error[1].any()
    described = {kind: tuple(each.shape) for kind, each in found.items() if kind != "weight_shape"}
    assert described == {kind: s.shape for kind, s in stored_tensors(form, *shape).items()}


@pytest.mark.parametrize("kind", ["int4", "fp8"])
def test_linear_layers_are_quantized_and_all_else_is_kept(kind: str, tmp_path: Path) -> None:
    """In shards; the index names the new tensors."""
    source, target = tmp_path / "plain", tmp_path / "quantized"
    write_llama(source, dtype=torch.bfloat16, max_shard_size="60KB", hidden_size=64, head_dim=16)
    (source / "tokenizer.json").write_text("{}")
    quantize(source, target, kind, ignored=["model.layers.0.mlp.up_proj"])  # type: ignore[arg-type]
    names = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
    assert len({*names.values()}) > 1
    for name, shard in names.items():
        with safe_open(target / shard, "pt") as file:
            assert name in file.keys()  # noqa: SIM118 (no mapping)
    assert (target / "tokenizer.json").read_text() == "{}"
    before = [load_file(path) for path in source.glob("*.safetensors")]
    after = [load_file(path) for path in target.glob("*.safetensors")]
    old = {name: tensor for each in before for name, tensor in each.items()}
    new = {name: tensor for each in after for name, tensor in each.items()}
    suffix = "weight_packed" if kind == "int4" else "weight_scale_inv"
    quantized = {name.removesuffix(f".{suffix}") for name in new if name.endswith(suffix)}
    assert len(quantized) == 2 * 7 - 1
    assert "model.layers.0.mlp.up_proj" not in quantized
    for name, tensor in old.items():
        if name.removesuffix(".weight") not in quantized:
            assert torch.equal(new[name], tensor)


@pytest.mark.parametrize(
    ("kind", "listed"), [("int4", "ignore"), ("fp8", "modules_to_not_convert")]
)
def test_an_image_encoder_stays_dense(kind: str, listed: str, tmp_path: Path) -> None:
    """Its layers have names like those of the decoder; the config names them for other programs."""
    FAMILIES["smolvlm"].write(tmp_path / "plain")
    quantize(tmp_path / "plain", tmp_path / "new", kind, group=16)  # type: ignore[arg-type]
    old, new = (load_file(tmp_path / each / "model.safetensors") for each in ("plain", "new"))
    encoder = [name for name in old if name.startswith(("model.vision_model.", "model.connector."))]
    assert all(torch.equal(new[name], old[name]) for name in encoder)
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    found = set(config["quantization_config"][listed])
    assert "model.vision_model.encoder.layers.0.self_attn.q_proj" in found
    assert "model.vision_model.encoder.layers.0.mlp.fc1" in found
    assert not any(name.startswith("model.text_model.layers.") for name in found)


class Stopped(Exception):
    """Ends a run after its first shard."""


class StopAtConfig(NoProgress):
    def advance(self, what: str, num_bytes: int) -> None:
        if what == "generation_config.json":
            raise Stopped


def test_files_beside_the_model_are_copied_and_those_of_a_stopped_run_are_not(
    tmp_path: Path,
) -> None:
    """A killed run of another checkpoint left a shard, which has priority over an index."""
    source, target = tmp_path / "plain", tmp_path / "new"
    write_llama(source, dtype=torch.bfloat16, max_shard_size="60KB", hidden_size=64, head_dim=16)
    (source / "2_Dense").mkdir()
    beside = {"linear.weight": torch.randn(3, 3)}
    save_file(beside, source / "2_Dense" / "model.safetensors")
    with pytest.raises(Stopped):
        quantize_folder(source, target, "fp8", StopAtConfig())
    assert [each.name for each in tmp_path.iterdir()] == ["plain"]
    left = tmp_path / "new.partial"
    (left / "files").mkdir(parents=True)
    (left / "lock").touch()
    save_file(beside, left / "files" / "model.safetensors")
    quantize(source, target, "fp8")
    names = {path.relative_to(source).as_posix() for path in source.rglob("*")}
    assert {path.relative_to(target).as_posix() for path in target.rglob("*")} == names
    copied = load_file(target / "2_Dense" / "model.safetensors")
    assert torch.equal(copied["linear.weight"], beside["linear.weight"])


def test_weights_that_change_while_they_are_read_are_an_error(tmp_path: Path) -> None:
    """A download writes them again: some tensors would be the old ones."""
    source = tmp_path / "plain"
    write_llama(source, dtype=torch.bfloat16)

    class Download(NoProgress):
        def advance(self, what: str, num_bytes: int) -> None:
            os.utime(source / "model.safetensors", ns=(0, 0))

    with pytest.raises(CheckpointError, match=r"model\.safetensors: the file changed while"):
        quantize_folder(source, tmp_path / "new", "fp8", Download())
    assert not (tmp_path / "new").exists()


def test_codes_are_not_rounded_again(tmp_path: Path) -> None:
    """ModelOpt names its formats in a file of its own."""
    source = tmp_path / "plain"
    write_llama(source, dtype=torch.bfloat16)
    name = "model.layers.0.mlp.up_proj.weight"
    edit_tensors(source, lambda found: found.update({name: found[name].to(torch.float8_e4m3fn)}))
    with pytest.raises(CheckpointError, match=rf"tensor {name} is F8_E4M3; only BF16"):
        quantize(source, tmp_path / "new", "fp8")
    edit_tensors(source, lambda found: found.update({name: found[name].to(torch.complex64)}))
    with pytest.raises(CheckpointError, match=f"tensor {name}: dtype 'C64' is not supported"):
        quantize(source, tmp_path / "new", "fp8")


def test_codes_of_stacked_experts_are_not_rounded_again(tmp_path: Path) -> None:
    source = tmp_path / "plain"
    FAMILIES["gpt-oss"].write(source, hidden_size=64, intermediate_size=64)
    name = "model.layers.1.mlp.experts.down_proj"
    edit_tensors(source, lambda found: found.update({name: found[name].to(torch.float8_e4m3fn)}))
    with pytest.raises(CheckpointError, match=rf"tensor {name} is F8_E4M3; only BF16"):
        quantize(source, tmp_path / "new", "mxfp4")


def spoil_last(tensors: dict[str, Tensor], name: str, value: float) -> None:
    tensors[name].view(-1)[-1] = value


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_no_numbers_are_named(value: float, tmp_path: Path) -> None:
    """The scale of a NaN is one: all weights of its group would be lost. Others are copied."""
    source = tmp_path / "plain"
    write_llama(source, dtype=torch.bfloat16)
    spoiled = "model.layers.1.mlp.down_proj.weight"
    edit_tensors(source, lambda found: spoil_last(found, spoiled, value))
    for kind, options in (("int4", {"group": 0, "is_symmetric": value > 0}), ("fp8", {})):
        with pytest.raises(CheckpointError, match=rf"tensor {spoiled} has NaN or infinite"):
            quantize(source, tmp_path / kind, kind, **options)  # type: ignore[arg-type]
        assert not (tmp_path / kind).exists()
    quantize(source, tmp_path / "dense", "fp8", ignored=[spoiled.removesuffix(".weight")])
    FAMILIES["gpt-oss"].write(tmp_path / "experts", hidden_size=64, intermediate_size=64)
    spoiled = "model.layers.1.mlp.experts.down_proj"
    edit_tensors(tmp_path / "experts", lambda found: spoil_last(found, spoiled, value))
    with pytest.raises(CheckpointError, match=rf"tensor {spoiled} has NaN or infinite"):
        quantize(tmp_path / "experts", tmp_path / "mxfp4", "mxfp4")


def test_what_cannot_be_quantized(tmp_path: Path) -> None:
    source = tmp_path / "plain"
    write_llama(source, dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match="rows of 48 columns are no multiple of group_size"):
        quantize(source, tmp_path / "new", "int4")
    with pytest.raises(ConfigError, match="no linear layer is left"):
        quantize(source, tmp_path / "new", "int4", ignored=["re:.*"])
    with pytest.raises(ConfigError, match=r"is inside of .*plain: name a folder outside of it"):
        quantize(source, source / "new", "fp8")
    assert not (tmp_path / "new").exists() and not (source / "new").exists()
    quantize(source, tmp_path / "new", "fp8")
    with pytest.raises(ConfigError, match="is quantized already"):
        quantize(tmp_path / "new", tmp_path / "again", "fp8")


def test_experts_in_one_tensor_are_refused(tmp_path: Path) -> None:
    FAMILIES["llama4, experts"].write(tmp_path / "llama4")
    with pytest.raises(CheckpointError, match=r"experts\.\w+ has the weights of all experts"):
        quantize(tmp_path / "llama4", tmp_path / "copy", "fp8")
    with pytest.raises(ConfigError, match="mxfp4 is for the experts of gpt-oss"):
        quantize(tmp_path / "llama4", tmp_path / "copy", "mxfp4")
    assert not (tmp_path / "copy").exists()

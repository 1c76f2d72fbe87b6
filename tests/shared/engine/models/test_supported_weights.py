"""Each cell of `hearth models --supported`: a small random model of the architecture, all of whose
layers have the format but those that the cell leaves out, is read with the numbers of the dense
one; rotary projections that it leaves out are refused in one line, as is the format where the cell
says no.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.cli.checkpoints.support_table import (
    EXPERTS,
    FORMATS,
    ROTARY,
    dense_parts,
    smallest_config,
)
from shared.engine.executors.loading.model_loading import empty_model, open_weights
from shared.engine.models import FAMILIES as ARCHITECTURES
from shared.engine.models.checkpoint_config import read_config
from shared.engine.models.decoder import Decoder
from shared.engine.weights.load import load_weights
from shared.errors import CheckpointError
from tests.support.engine.families import FAMILIES, KimiText, one_tensor_each
from tests.support.engine.quantized import dequantize_folder, edit_config, edit_tensors, quantize
from tests.support.engine.stored_formats import (
    StoredFormat,
    awq,
    fp8,
    fp8_blocks,
    gptq,
    int8,
    packed,
    write_formats,
)
from tests.support.grids import in_short_run

GROUPS = 0  # a group a row: families have widths of 20 to 80
STORED: dict[str, StoredFormat] = {
    "INT4": packed(GROUPS, num_bits=4),
    "INT4 with zeros": packed(GROUPS, num_bits=4, is_symmetric=False),
    "INT8 packed": packed(GROUPS),
    "INT8": int8(),
    "FP8 blocks": fp8_blocks("compressed-tensors", scale_dtype=torch.bfloat16),
    "FP8": fp8(),
    "AWQ": awq(GROUPS),
    "GPTQ": gptq(GROUPS),
}
# Widths and rows that fill words of eight codes.
WHOLE: dict[str, Any] = {"qk_nope_head_dim": 8, "v_head_dim": 8, "q_lora_rank": 16}
# Values are one GEMM with rotary queries and keys.
ROTARY_LAYERS = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_a_proj_with_mqa")
MXFP4 = "MXFP4"
CELLS = [(a, name) for a in ARCHITECTURES for name in FORMATS]
SHORT = [
    ("LlamaForCausalLM", "AWQ"),
    ("Phi3ForCausalLM", "GPTQ"),
    ("MixtralForCausalLM", "FP8"),
    ("DeepseekV3ForCausalLM", "GPTQ"),
    ("Llama4ForCausalLM", "INT8"),
]


def written(architecture: str, folder: Path) -> Path:
    family = next(
        (each for each in FAMILIES.values() if each.architecture == architecture),
        KimiText(architecture, FAMILIES["kimi, text"].fields),
    )
    fields = dict(family.fields)
    if "kv_lora_rank" in fields:
        fields |= {**WHOLE, "kv_lora_rank": 24}
    if architecture == "Llama4ForCausalLM":
        fields = FAMILIES["llama4, experts"].fields
    if architecture == "GptOssForCausalLM":
        fields |= {"hidden_size": 64, "intermediate_size": 32}
    type(family)(architecture, fields).write(folder, dtype=torch.bfloat16)
    if architecture.startswith("Llama4"):
        edit_tensors(folder, one_tensor_each)
    return folder


def write_cell(
    plain: Path, architecture: str, name: str, *, without: list[str]
) -> tuple[Path, Path]:
    """`without`: parts that stay dense."""
    if name == MXFP4:
        stored = quantize(plain, plain.with_name("stored"), "mxfp4")
        return stored, dequantize_folder(stored, plain.with_name("dense"), torch.bfloat16)
    kept = [*ROTARY_LAYERS] if ROTARY in without else []
    kept += ["experts"] if EXPERTS in without else []

    def form(layer: str) -> StoredFormat | None:
        is_part = "vision" in layer or "projector" in layer or "connector" in layer
        return None if is_part or any(f".{each}" in layer for each in kept) else STORED[name]

    config = STORED[name].config
    if config["quant_method"] == "compressed-tensors":
        ignored = ["lm_head", *(rf"re:.*\.{each}(\.|$).*" for each in kept)]
        return write_formats(plain, plain.with_name("stored"), form, ignore=ignored)
    fields = {"modules_to_not_convert": kept}
    return write_formats(plain, plain.with_name("stored"), form, **fields)


def loaded(folder: Path) -> Decoder:
    config = read_config(folder)
    model = empty_model(folder, config, "bfloat16", torch.device("cpu"), num_positions=8)
    with open_weights(folder, config, model, "auto") as weights:
        load_weights(weights.tensors, model.weight_destinations())
    return model


def weights_of(model: Decoder) -> dict[str, Tensor]:
    found = {}
    for name, module in model.named_modules():
        store = getattr(module, "store", None)
        weight = getattr(module, "weight", None)
        if store is not None and isinstance(weight, Tensor):
            is_padded = type(module).__name__ == "ExpertLinear"
            weight = store.transcoded(weight, is_padded=is_padded).dense()
            found[f"{name} stored"] = torch.ones(1)
        if isinstance(weight, Tensor):
            found[name] = weight
    return found


def assert_no_mxfp4(plain: Path) -> None:
    edit_config(plain, lambda given: given.update(quantization_config={"quant_method": "mxfp4"}))
    with pytest.raises(CheckpointError, match="not supported but for the experts of gpt-") as error:
        read_config(plain)
    assert "\n" not in error.value.message
    assert "take one of these, or run `hearth quantize`" in error.value.message


@pytest.mark.parametrize(("architecture", "name"), in_short_run(SHORT, CELLS))
def test_weights_are_read(architecture: str, name: str, tmp_path: Path) -> None:
    plain = written(architecture, tmp_path / "plain")
    if name == MXFP4 and not read_config(plain).checkpoint.has_mxfp4:
        assert_no_mxfp4(plain)
        return
    without = dense_parts(read_config(plain), FORMATS[name])
    folder, dense = write_cell(plain, architecture, name, without=without)
    found, expected = weights_of(loaded(folder)), weights_of(loaded(dense))
    assert any(each.endswith(" stored") for each in found)
    for key, weight in expected.items():
        if key not in found:  # one GEMM of layers that differ here
            assert key.endswith(".qkv_a_proj")
            continue
        read = found[key]
        shape = tuple(slice(size) for size in read.shape)
        assert torch.equal(read, weight[shape]), key
    if ROTARY in without:
        others = [each for each in without if each != ROTARY]
        (tmp_path / "other").mkdir()
        again = written(architecture, tmp_path / "other/plain")
        folder, _ = write_cell(again, architecture, name, without=others)
        with pytest.raises(CheckpointError, match="of a layer with rotary pairs are not") as error:
            loaded(folder)
        assert "\n" not in error.value.message
        assert "leave these layers dense, or take a format that `hearth models" in str(error.value)


def test_smallest_configs_stand_for_their_families(tmp_path: Path) -> None:
    """What decides a cell is the same for a checkpoint."""
    for number, architecture in enumerate(("DeepseekV3ForCausalLM", "Llama4ForCausalLM")):
        config = read_config(written(architecture, tmp_path / str(number)))
        smallest = smallest_config(architecture)
        for form in FORMATS.values():
            assert dense_parts(smallest, form) == dense_parts(config, form)
    assert FORMATS.keys() == {*STORED, MXFP4}

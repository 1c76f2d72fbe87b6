"""Quantized checkpoints with latents: rotary rows are put in order, expansions are dequantized."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.engine.executors.load import load_executor
from shared.engine.model_config.checkpoint_form import CheckpointForm, PairedRows
from shared.engine.parallel.cuts import WHOLE
from shared.engine.weights.checkpoint_tensors import FormedTensors
from shared.engine.weights.load import open_checkpoint
from shared.errors import CheckpointError
from tests.shared.engine.model_config.test_quantization_config import KIMI_IGNORED
from tests.support.engine.families import FAMILIES
from tests.support.engine.quantized import dequantize_folder, edit_config, edit_tensors, quantize
from tests.support.engine.steps import Blocks, prefill
from tests.support.grids import in_short_run

PROMPT = [(11 * n) % 190 for n in range(45)]
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "deepseek, fp8": ("deepseek", "fp8", {}),
    "deepseek, int4": ("deepseek", "int4", {"group": 0}),
    "kimi, int4 experts": ("kimi, text", "int4", {"group": 0, "ignored": KIMI_IGNORED}),
}


def logits(folder: Path, dtype: str = "bfloat16") -> Tensor:
    executor = load_executor(folder, dtype=dtype, kv_cache_bytes=1 << 20)
    return prefill(executor, Blocks(executor.num_blocks).line(PROMPT), 33)


@pytest.mark.parametrize("name", in_short_run(["deepseek, fp8"], KINDS))
def test_logits_are_those_of_the_dequantized_checkpoint(name: str, tmp_path: Path) -> None:
    family, kind, options = KINDS[name]
    FAMILIES[family].write(tmp_path / "plain", dtype=torch.bfloat16)
    folder = quantize(tmp_path / "plain", tmp_path / "quantized", kind, **options)  # type: ignore[arg-type]
    dense = dequantize_folder(folder, tmp_path / "dense", torch.bfloat16)
    assert torch.equal(logits(folder), logits(dense))


def test_kimis_config_may_be_written_twice(tmp_path: Path) -> None:
    """For the model and for its language model; the dense layers of Kimi are not quantized."""
    FAMILIES["kimi, text"].write(tmp_path / "plain", dtype=torch.bfloat16)
    folder = quantize(
        tmp_path / "plain", tmp_path / "quantized", "int4", group=0, ignored=KIMI_IGNORED[:3]
    )

    def twice(config: dict[str, Any]) -> None:
        config["text_config"]["quantization_config"] = config["quantization_config"]

    copied = shutil.copytree(folder, tmp_path / "twice")
    edit_config(copied, twice)
    assert torch.equal(logits(copied, "float32"), logits(folder, "float32"))
    edit_config(copied, lambda c: c["quantization_config"].update(ignore=KIMI_IGNORED))
    message = "quantization_config and text_config.quantization_config disagree: ignore is"
    with pytest.raises(CheckpointError, match=message):
        logits(copied, "float32")


def test_zeros_of_rotary_rows_are_refused(tmp_path: Path) -> None:
    FAMILIES["deepseek"].write(tmp_path / "plain", dtype=torch.bfloat16)
    options = {"group": 0, "is_symmetric": False}
    folder = quantize(tmp_path / "plain", tmp_path / "quantized", "int4", **options)
    with pytest.raises(CheckpointError, match=r"weight_zero_point: zero points of a layer with ro"):
        logits(folder, "float32")


@pytest.mark.parametrize("kind", ["weight_scale", "weight_scale_inv"])
def test_rotary_rows_in_two_blocks_are_refused(kind: str, tmp_path: Path) -> None:
    FAMILIES["deepseek"].write(tmp_path / "plain", dtype=torch.bfloat16, intermediate_size=240)
    folder = quantize(tmp_path / "plain", tmp_path / "quantized", "fp8")
    name = "model.layers.0.mlp.up_proj"
    edit_tensors(
        folder, lambda each: each.update({f"{name}.{kind}": each.pop(f"{name}.weight_scale_inv")})
    )
    rows = PairedRows(head=60, first=0, dim=60)
    form = CheckpointForm(paired=((rf"{name}\.weight", rows),))
    with open_checkpoint(folder) as tensors:
        formed = FormedTensors(tensors, form)
        scale = f"{name}.{kind}"
        out = torch.empty(formed.info(scale).shape)
        with pytest.raises(CheckpointError, match="rotary rows 120 to 179 of one head are in two"):
            formed.read_into(scale, WHOLE, out)

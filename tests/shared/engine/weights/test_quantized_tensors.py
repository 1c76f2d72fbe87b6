"""Tensors that contradict quantization_config, or each other: one line that names both."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.engine.executors.load import load_executor
from shared.errors import CheckpointError
from tests.support.engine.checkpoints import write_llama
from tests.support.engine.quantized import (
    dequantize_folder,
    edit_config,
    edit_tensors,
    quantize,
)
from tests.support.engine.stored_formats import awq, fp8, gptq, int8, write_formats

UP = "model.layers.1.mlp.up_proj"
STORED = {
    "awq": awq(16),
    "gptq": gptq(16),
    "gptq order": gptq(16, is_ordered=True),
    "int8": int8(),
    "fp8 rows": fp8(),
    "fp8 tensor": fp8("fp8", is_per_tensor=True),
}
Edit = Callable[[dict[str, Any]], Any]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    write_llama(root / "plain", dtype=torch.bfloat16, tie_word_embeddings=False)
    found = {
        "int4": quantize(root / "plain", root / "int4", "int4", group=16, is_symmetric=False),
        "fp8": quantize(root / "plain", root / "fp8", "fp8"),
    }
    found["dense"] = dequantize_folder(found["int4"], root / "dense", torch.bfloat16)
    for name, form in STORED.items():
        found[name], _ = write_formats(root / "plain", root / name, lambda _, form=form: form)
    return found


def set_tensor(name: str, tensor: Tensor) -> Edit:
    return lambda tensors: tensors.update({name: tensor})


def remove(name: str) -> Edit:
    return lambda tensors: tensors.pop(name)


def set_scales(kind: str, *values: float) -> Edit:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[f"{UP}.{kind}"].view(-1)[: len(values)] = torch.tensor(values)

    return edit


def ignore(*names: str) -> Edit:
    return lambda config: config["quantization_config"].update(ignore=["lm_head", *names])


def target(*names: str) -> Edit:
    def edit(config: dict[str, Any]) -> None:
        config["quantization_config"]["config_groups"]["group_0"]["targets"] = list(names)

    return edit


def set_group(size: int) -> Edit:
    def edit(config: dict[str, Any]) -> None:
        weights = config["quantization_config"]["config_groups"]["group_0"]["weights"]
        weights["group_size"] = size

    return edit


TENSORS: dict[str, tuple[str, Edit, str]] = {
    "scale missing": (
        "int4",
        remove(f"{UP}.weight_scale"),
        f"tensor {UP}.weight_scale is missing beside weight_packed, weight_zero_point",
    ),
    "zeros missing": (
        "int4",
        remove(f"{UP}.weight_zero_point"),
        f"tensor {UP}.weight_zero_point is missing beside weight_packed, weight_scale",
    ),
    "scale of a wrong shape": (
        "int4",
        set_tensor(f"{UP}.weight_scale", torch.ones(96, 4).bfloat16()),
        f"tensor {UP}.weight_scale has shape [96, 4], the config requires [96, 3]",
    ),
    "packed of a wrong dtype": (
        "int4",
        set_tensor(f"{UP}.weight_packed", torch.ones(96, 6)),
        f"tensor {UP}.weight_packed is F32, not I32",
    ),
    "scale of a wrong dtype": (
        "int4",
        set_tensor(f"{UP}.weight_scale", torch.ones(96, 3)),
        f"tensor {UP}.weight_scale is F32, but the config or other scales make it BF16",
    ),
    "shape that contradicts": (
        "int4",
        set_tensor(f"{UP}.weight_shape", torch.tensor([96, 64])),
        f"tensor {UP}.weight_shape is [96, 64], but weight_packed must be [96, 6]",
    ),
    "shape of three": (
        "int4",
        set_tensor(f"{UP}.weight_shape", torch.tensor([1, 96, 48])),
        f"tensor {UP}.weight_shape has shape [3], not [2]",
    ),
    "scales that are no numbers": (
        "int4",
        set_scales("weight_scale", float("nan"), float("inf")),
        f"tensor {UP}.weight_scale: 2 of 288 scales are NaN or infinite",
    ),
    "order of columns": (
        "int4",
        set_tensor(f"{UP}.weight_g_idx", torch.arange(48).int()),
        f"{UP} is packed with an order of columns (weight_g_idx, actorder), but quantization_",
    ),
    "packed head": (
        "int4",
        set_tensor("lm_head.weight_packed", torch.ones(199, 6).int()),
        "lm_head is packed (weight_packed), but quantization_config ignores it by 'lm_head'",
    ),
    "fp8 scale missing": (
        "fp8",
        remove(f"{UP}.weight_scale_inv"),
        f"{UP} is F8_E4M3, but quantization_config makes it fp8 in blocks of 128 x 128",
    ),
    "fp8 per channel": (
        "fp8",
        lambda tensors: tensors.update(
            {f"{UP}.weight_scale": tensors.pop(f"{UP}.weight_scale_inv")}
        ),
        f"{UP} is F8_E4M3 (weight_scale), but quantization_config makes it fp8 in blocks",
    ),
    "fp8 scale that is no number": (
        "fp8",
        set_scales("weight_scale_inv", float("-inf")),
        f"tensor {UP}.weight_scale_inv: 1 of 1 scales are NaN or infinite",
    ),
}
TENSORS |= {
    "awq scales missing": (
        "awq",
        remove(f"{UP}.scales"),
        f"tensor {UP}.scales is missing beside qweight, qzeros",
    ),
    "awq zeros missing": (
        "awq",
        remove(f"{UP}.qzeros"),
        f"tensor {UP}.qzeros is missing beside qweight, scales",
    ),
    "awq of a wrong shape": (
        "awq",
        set_tensor(f"{UP}.qweight", torch.ones(6, 96).int()),
        f"tensor {UP}.qweight has shape [6, 96], the config requires [48, 12]",
    ),
    "awq scales that are no numbers": (
        "awq",
        set_scales("scales", float("nan"), float("inf"), float("-inf")),
        f"tensor {UP}.scales: 3 of 288 scales are NaN or infinite",
    ),
    "awq scales of a wrong dtype": (
        "awq",
        set_tensor(f"{UP}.scales", torch.ones(3, 96)),
        f"tensor {UP}.scales is F32, but the config or other scales make it F16",
    ),
    "awq with an order": (
        "awq",
        set_tensor(f"{UP}.g_idx", torch.arange(48).int()),
        f"tensor {UP}.g_idx is unexpected: quantization_config makes it awq in groups of 16",
    ),
    "an order without desc_act": (
        "gptq",
        set_tensor(f"{UP}.g_idx", (torch.arange(48) // 16).flip(0).int()),
        f"tensor {UP}.g_idx is an order of columns, but desc_act is false",
    ),
    "zeros that sym excludes": (
        "gptq",
        set_tensor(f"{UP}.qzeros", torch.full((3, 12), -0x77777778).int()),
        f"tensor {UP}.qzeros has zeros other than 7, which sym and checkpoint_format require",
    ),
    "no order with desc_act": (
        "gptq order",
        remove(f"{UP}.g_idx"),
        f"tensor {UP}.g_idx is missing beside qweight, qzeros, scales",
    ),
    "an order of groups that do not exist": (
        "gptq order",
        set_tensor(f"{UP}.g_idx", (torch.arange(48) // 8).int()),
        f"tensor {UP}.g_idx has groups 0 to 5, but there are 3",
    ),
    "dense weights for bytes": (
        "int8",
        set_tensor(f"{UP}.weight", torch.ones(96, 48)),
        f"{UP} is F32 (weight_scale), but quantization_config makes it int8 bytes in one group",
    ),
    "bytes without a scale": (
        "int8",
        remove(f"{UP}.weight_scale"),
        f"{UP} is I8, but quantization_config makes it int8 bytes in one group a row, symmetric",
    ),
    "zeros of symmetric bytes": (
        "int8",
        set_tensor(f"{UP}.weight_zero_point", torch.zeros(96, 1, dtype=torch.int8)),
        f"tensor {UP}.weight_zero_point is unexpected: quantization_config makes it int8",
    ),
    "fp8 scale of a tensor for rows": (
        "fp8 rows",
        set_tensor(f"{UP}.weight_scale", torch.ones(1)),
        f"tensor {UP}.weight_scale has shape [1], the config requires [96, 1]",
    ),
    "fp8 scales of rows for a tensor": (
        "fp8 tensor",
        set_tensor(f"{UP}.weight_scale", torch.ones(96, 1)),
        f"tensor {UP}.weight_scale has shape [96, 1], the config requires [1]",
    ),
    "fp8 scale that is infinite": (
        "fp8 tensor",
        set_tensor(f"{UP}.weight_scale", torch.tensor(float("inf"))),
        f"tensor {UP}.weight_scale: 1 of 1 scales are NaN or infinite",
    ),
}
CONFIGS: dict[str, tuple[str, Edit, str]] = {
    "eight bits for four": (
        "gptq",
        lambda config: config["quantization_config"].update(bits=8),
        "mlp.down_proj.qweight has shape [12, 48], the config requires [24, 48]",
    ),
    "awq that is gptq": (
        "gptq",
        lambda config: config["quantization_config"].update(quant_method="awq"),
        ".mlp.down_proj.g_idx is unexpected: quantization_config makes it awq in groups of 16",
    ),
    "groups that do not fill a row of awq": (
        "awq",
        lambda config: config["quantization_config"].update(group_size=36),
        "self_attn.q_proj: rows of 48 columns are no multiple of group_size 36",
    ),
    "ignored and packed": (
        "int4",
        ignore(r"re:.*mlp.*"),
        "down_proj is packed (weight_packed), but quantization_config ignores it by 're:.*mlp.*'",
    ),
    "not targeted and packed": (
        "int4",
        target(r"re:.*self_attn.*"),
        ".mlp.down_proj is packed (weight_packed), but quantization_config targets it with no",
    ),
    "group that matches nothing": (
        "int4",
        target(r"re:.*experts.*"),
        "no layer is matched by the targets ['re:.*experts.*']",
    ),
    "groups that do not fill a row": (
        "int4",
        set_group(36),
        "model.layers.0.self_attn.q_proj: rows of 48 columns are no multiple of group_size 36",
    ),
    "dense weights": (
        "dense",
        lambda config: config.update(
            quantization_config={
                "quant_method": "fp8",
                "weight_block_size": [128, 128],
            }
        ),
        ".mlp.down_proj is dense, but quantization_config makes it fp8 in blocks of 128 x 128",
    ),
}


@pytest.mark.parametrize("case", TENSORS)
def test_contradicting_tensors(case: str, folders: dict[str, Path], tmp_path: Path) -> None:
    kind, edit, message = TENSORS[case]
    folder = shutil.copytree(folders[kind], tmp_path / "edited")
    edit_tensors(folder, edit)
    assert_refused(folder, message)


@pytest.mark.parametrize("case", CONFIGS)
def test_contradicting_configs(case: str, folders: dict[str, Path], tmp_path: Path) -> None:
    kind, edit, message = CONFIGS[case]
    folder = shutil.copytree(folders[kind], tmp_path / "edited")
    edit_config(folder, edit)
    assert_refused(folder, message)


def assert_refused(folder: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)) as error:
        load_executor(folder, dtype="float32", kv_cache_bytes=1 << 20)
    assert "\n" not in error.value.message

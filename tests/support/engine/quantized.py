"""Quantized checkpoints, and the dense ones that have the same weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels.reference.dequantize import dequantize_fp8, dequantize_int4, dequantize_mxfp4
from shared.engine.quantize.quantize_folder import quantize_folder

FILE, CONFIG = "model.safetensors", "config.json"


def packed_config(target: str = "Linear", *, group_size: int = 32, **more: Any) -> dict[str, Any]:
    """Returns the `quantization_config` of four-bit weights. `more` are further options of the
    weights.
    """
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": group_size,
        **more,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": [target], "weights": weights}},
        "ignore": ["lm_head"],
    }


class NoProgress:
    def expect(self, num_bytes: int) -> None: ...
    def advance(self, what: str, num_bytes: int) -> None: ...


def quantize(
    source: Path, target: Path, kind: Literal["int4", "fp8", "mxfp4"], **options: Any
) -> Path:
    quantize_folder(source, target, kind, NoProgress(), **options)
    return target


def dequantize_folder(source: Path, target: Path, dtype: torch.dtype) -> Path:
    """Writes the dense checkpoint whose weights are the dequantized ones in `dtype`."""
    shutil.copytree(source, target)
    edit_config(target, lambda config: config.pop("quantization_config"))
    edit_tensors(target, lambda tensors: _dequantize(tensors, dtype))
    return target


def edit_config(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((folder / CONFIG).read_text())
    edit(config)
    (folder / CONFIG).write_text(json.dumps(config))


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / FILE)
    edit(tensors)
    (folder / FILE).unlink()
    save_file(tensors, folder / FILE, metadata={"format": "pt"})


def _dequantize(tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    for name in [*tensors]:
        layer, _, kind = name.rpartition(".")
        if kind == "weight_packed":
            width = int(tensors.pop(f"{layer}.weight_shape")[1])
            zeros = tensors.pop(f"{layer}.weight_zero_point", None)
            parts = tensors.pop(name), tensors.pop(f"{layer}.weight_scale"), zeros
            tensors[f"{layer}.weight"] = dequantize_int4(*parts, width, dtype)
        elif kind == "weight_scale_inv":
            codes = tensors.pop(f"{layer}.weight")
            tensors[f"{layer}.weight"] = dequantize_fp8(codes, tensors.pop(name), dtype)
        elif name.endswith("_blocks"):
            stem = name.removesuffix("_blocks")
            rows = dequantize_mxfp4(tensors.pop(name), tensors.pop(f"{stem}_scales"), dtype)
            tensors[stem] = rows.transpose(1, 2).contiguous()

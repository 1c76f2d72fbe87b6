"""Checkpoints in the formats that other tools write, rounded from dense ones to the nearest, and
the dense ones that have the same weights: packing as the tools' documentation describes it.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.reference.dequantize import (
    dequantize_awq,
    dequantize_fp8,
    dequantize_gptq,
    dequantize_packed,
    dequantize_rows,
)
from shared.engine.model_config.formats import Fp8Block
from shared.engine.quantize.round_to_nearest import quantized_tensors
from tests.support.engine.quantized import CONFIG, edit_config, edit_tensors

LINEAR = re.compile(r"(.*layers\.\d+\..*(?:_proj|_proj_with_mqa|\.w[123]))\.weight")
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class StoredFormat:
    """`store`: weight [N, K] -> its tensors by the ends of their names; `dense`: these, and the
    shape and dtype of the weight -> the weight.
    """

    config: dict[str, Any]
    store: Callable[[Tensor], Tensors]
    dense: Callable[[Tensors, torch.Size, torch.dtype], Tensor]


def write_formats(
    source: Path,
    target: Path,
    format_of: Callable[[str], StoredFormat | None],
    dtype: torch.dtype = torch.bfloat16,
    **config: Any,
) -> tuple[Path, Path]:
    """Writes `target` with linear layers in the format of their name, and beside it the dense
    checkpoint of the same numbers in `dtype`. Returns both folders; `config` replaces fields of
    `quantization_config`.
    """
    dense = target.with_name(f"{target.name}-dense")
    for folder in (target, dense):
        shutil.copytree(source, folder)
    kept: Tensors = {}
    written: list[StoredFormat] = []

    def store(tensors: Tensors) -> None:
        for name in [*tensors]:
            found = LINEAR.fullmatch(name)
            form = None if found is None else format_of(found[1])
            if found is None or form is None or tensors[name].ndim != 2:
                continue
            written.append(form)
            weight = tensors.pop(name)
            stored = form.store(weight.float())
            kept[name] = form.dense(stored, weight.shape, dtype).contiguous()
            tensors |= {f"{found[1]}.{kind}": each.contiguous() for kind, each in stored.items()}

    edit_tensors(target, store)
    edit_tensors(dense, lambda tensors: tensors.update(kept))
    fields = {**written[0].config, **config}
    edit_config(target, lambda given: given.update(quantization_config=fields))
    return target, dense


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / CONFIG).read_text())
    return found


def packed_words(codes: Tensor, num_bits: int) -> Tensor:
    """[n, m] -> int32 [n, ⌈m · bits / 32⌉], lowest bits first."""
    count = 32 // num_bits
    padded = torch.nn.functional.pad(codes.long(), (0, -codes.shape[1] % count))
    shifts = torch.arange(0, 32, num_bits)
    words = (padded.view(len(codes), -1, count) << shifts).sum(2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def rounded(
    weight: Tensor, group: int, num_bits: int, *, is_symmetric: bool, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """weight [N, K] -> codes [N, K], zeros and scales [N, groups]."""
    largest_code = (1 << num_bits) - 1
    grouped = weight.view(len(weight), -1, group or weight.shape[1])
    largest, least = grouped.amax(2).clamp(min=0), grouped.amin(2).clamp(max=0)
    span = 2 * torch.maximum(largest, -least) if is_symmetric else largest - least
    scale = (span / largest_code).to(scale_dtype)
    zero = torch.full(scale.shape, 1 << num_bits - 1)
    if not is_symmetric:
        zero = (-least / scale.float()).round().clamp(0, largest_code).long()
    codes = (grouped / scale.float()[:, :, None]).round() + zero[:, :, None]
    return codes.clamp(0, largest_code).view(weight.shape).long(), zero, scale


def awq(group: int = 32) -> StoredFormat:
    def words(codes: Tensor) -> Tensor:
        """[N, m] -> [m, N / 8]"""
        order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
        return packed_words(codes.t().reshape(codes.shape[1], -1, 8)[:, :, order].flatten(1), 4)

    def store(weight: Tensor) -> Tensors:
        mode = {"is_symmetric": False, "scale_dtype": torch.float16}
        codes, zeros, scale = rounded(weight, group, 4, **mode)
        return {"qweight": words(codes), "qzeros": words(zeros), "scales": scale.t()}

    return StoredFormat(
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": group or -1,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": None,
        },
        store,
        lambda found, _, dtype: dequantize_awq(
            found["qweight"], found["qzeros"], found["scales"], dtype
        ),
    )


def gptq(
    group: int = 32,
    *,
    num_bits: int = 4,
    version: int = 1,
    is_symmetric: bool = True,
    is_ordered: bool = False,
    scale_dtype: torch.dtype = torch.float16,
) -> StoredFormat:
    def store(weight: Tensor) -> Tensors:
        width = weight.shape[1]
        groups = torch.arange(width) // (group or width)
        order = torch.arange(width)
        if is_ordered:
            order = torch.randperm(width, generator=torch.Generator().manual_seed(width))
        mode: dict[str, Any] = {"is_symmetric": is_symmetric, "scale_dtype": scale_dtype}
        codes, zeros, scale = rounded(weight[:, order], group, num_bits, **mode)
        back = order.argsort()
        words = packed_words(zeros.t(), num_bits).long()
        if version == 1:
            words -= sum(1 << at for at in range(0, 32, num_bits))
        words = words + (1 << 31) & 0xFFFFFFFF
        return {
            "qweight": packed_words(codes[:, back], num_bits).t(),
            "qzeros": (words - (1 << 31)).to(torch.int32),
            "scales": scale.t(),
            "g_idx": groups[back].to(torch.int32),
        }

    return StoredFormat(
        {
            "quant_method": "gptq",
            "bits": num_bits,
            "group_size": group or -1,
            "desc_act": is_ordered,
            "sym": is_symmetric,
            "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
            "lm_head": False,
        },
        store,
        lambda found, _, dtype: dequantize_gptq(
            found["qweight"],
            found["qzeros"],
            found["scales"],
            found["g_idx"],
            num_bits=num_bits,
            is_offset=version == 1,
            dtype=dtype,
        ),
    )


def packed(
    group: int = 32,
    *,
    num_bits: int = 8,
    is_symmetric: bool = True,
    is_ordered: bool = False,
    scale_dtype: torch.dtype = torch.bfloat16,
) -> StoredFormat:
    def store(weight: Tensor) -> Tensors:
        width = weight.shape[1]
        order = torch.arange(width)
        if is_ordered:
            order = torch.randperm(width, generator=torch.Generator().manual_seed(width))
        mode: dict[str, Any] = {"is_symmetric": is_symmetric, "scale_dtype": scale_dtype}
        codes, zeros, scale = rounded(weight[:, order], group, num_bits, **mode)
        back = order.argsort()
        found = {
            "weight_packed": packed_words(codes[:, back], num_bits),
            "weight_scale": scale,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not is_symmetric:
            found["weight_zero_point"] = packed_words(zeros.t(), num_bits).t()
        if is_ordered:
            found["weight_g_idx"] = (torch.arange(width) // group)[back].to(torch.int32)
        return found

    return StoredFormat(
        _compressed("pack-quantized", group, num_bits, is_symmetric, is_ordered=is_ordered),
        store,
        lambda found, shape, dtype: dequantize_packed(
            found["weight_packed"],
            found["weight_scale"],
            found.get("weight_zero_point"),
            shape[1],
            num_bits,
            dtype,
            found.get("weight_g_idx"),
        ),
    )


def int8(
    group: int = 0,
    *,
    is_symmetric: bool = True,
    is_per_tensor: bool = False,
    scale_dtype: torch.dtype = torch.bfloat16,
) -> StoredFormat:
    def store(weight: Tensor) -> Tensors:
        whole = weight.reshape(1, -1) if is_per_tensor else weight
        mode: dict[str, Any] = {"is_symmetric": is_symmetric, "scale_dtype": scale_dtype}
        codes, zeros, scale = rounded(whole, group, 8, **mode)
        found = {
            "weight": (codes - 128).to(torch.int8).view(weight.shape),
            "weight_scale": scale.view(1) if is_per_tensor else scale,
        }
        if not is_symmetric:
            found["weight_zero_point"] = (zeros - 128).to(torch.int8)
        return found

    config = _compressed("int-quantized", group, 8, is_symmetric)
    if is_per_tensor:
        config["config_groups"]["group_0"]["weights"]["strategy"] = "tensor"
    activations = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}
    config["config_groups"]["group_0"]["input_activations"] = activations
    return StoredFormat(config, store, _dense_rows)


def fp8(
    method: str = "compressed-tensors",
    *,
    is_per_tensor: bool = False,
    is_static: bool = False,
    scale: str = "weight_scale",
    scale_dtype: torch.dtype = torch.float32,
) -> StoredFormat:
    """`is_static`: with the scales of activations."""

    def store(weight: Tensor) -> Tensors:
        largest = weight.abs().amax() if is_per_tensor else weight.abs().amax(1, keepdim=True)
        scales = (largest / 448).to(scale_dtype)
        codes = (weight / scales.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
        found = {"weight": codes, scale: scales}
        return {**found, "input_scale": torch.tensor(0.5)} if is_static else found

    config: dict[str, Any] = {"quant_method": method, "modules_to_not_convert": ["lm_head"]}
    if method == "fp8":
        config |= {"activation_scheme": "static" if is_static else "dynamic"}
    if method == "compressed-tensors":
        config = _compressed("float-quantized", 0, 8, is_symmetric=True)
        weights = config["config_groups"]["group_0"]["weights"]
        weights |= {"type": "float", "strategy": "tensor" if is_per_tensor else "channel"}
    return StoredFormat(config, store, _dense_rows)


def fp8_blocks(method: str = "fp8", *, scale_dtype: torch.dtype = torch.float32) -> StoredFormat:
    config: dict[str, Any] = {"quant_method": method, "weight_block_size": [128, 128]}
    name = "weight_scale_inv"
    if method == "compressed-tensors":
        config, name = _compressed("float-quantized", 0, 8, is_symmetric=True), "weight_scale"
        weights = config["config_groups"]["group_0"]["weights"]
        weights |= {"type": "float", "strategy": "block", "block_structure": [128, 128]}

    def store(weight: Tensor) -> Tensors:
        found = quantized_tensors(weight, Fp8Block())
        return {"weight": found["weight"], name: found["weight_scale_inv"].to(scale_dtype)}

    def dense(found: Tensors, _: torch.Size, dtype: torch.dtype) -> Tensor:
        return dequantize_fp8(found["weight"], found[name].float(), dtype)

    return StoredFormat(config, store, dense)


def _dense_rows(found: Tensors, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    scale = next(each for kind, each in found.items() if kind.startswith("weight_scale"))
    return dequantize_rows(found["weight"], scale, found.get("weight_zero_point"), dtype)


def _compressed(
    stored: str, group: int, num_bits: int, is_symmetric: bool, *, is_ordered: bool = False
) -> dict[str, Any]:
    weights = {
        "num_bits": num_bits,
        "type": "int",
        "symmetric": is_symmetric,
        "strategy": "group" if group else "channel",
        "group_size": group or None,
        "actorder": "group" if is_ordered else None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


# Formats of the proofs, each with its peculiarities at least once.
FORMATS: dict[str, StoredFormat] = {
    "awq": awq(),
    "awq, rows": awq(0),
    "gptq": gptq(),
    "gptq, zeros": gptq(64, is_symmetric=False),
    "gptq v2, zeros, rows": gptq(0, version=2, is_symmetric=False),
    "gptq, desc_act": gptq(is_ordered=True, is_symmetric=False),
    "gptq, 8 bits, bf16": gptq(64, num_bits=8, is_symmetric=False, scale_dtype=torch.bfloat16),
    "int8 packed": packed(),
    "int8 packed, zeros": packed(0, is_symmetric=False),
    "int4, actorder": packed(num_bits=4, is_ordered=True),
    "int4, fp16": packed(num_bits=4, scale_dtype=torch.float16),
    "int8": int8(),
    "int8, groups, zeros": int8(32, is_symmetric=False),
    "int8 per tensor": int8(is_per_tensor=True),
    "fp8 per channel": fp8(scale_dtype=torch.bfloat16),
    "fp8 per tensor": fp8("fp8", is_per_tensor=True, is_static=True),
    "fp8 per tensor, inverse": fp8("fp8", is_per_tensor=True, scale="weight_scale_inv"),
    "fp8 of fbgemm": fp8("fbgemm_fp8"),
    "fp8 blocks": fp8_blocks("compressed-tensors", scale_dtype=torch.bfloat16),
}

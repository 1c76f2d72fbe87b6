"""Quantized tensors of a weight by rounding to the nearest code, without data.

    int4, symmetric    scale = max |w| / 7.5                code = round(w / scale) + 8
    int4, asymmetric   scale = (max(w, 0) - min(w, 0)) / 15 code = round(w / scale) + zero
    fp8                scale = max |w| / 448 of a block     code = E4M3(w / scale)

int4 is written as compressed-tensors does (its observer `minmax`), FP8 as DeepSeek-V3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shared.engine.model_config.formats import FP8_BLOCK, Fp8Block, Int4, num_groups
from shared.engine.weights.load import CheckpointTensors
from shared.engine.weights.weight_source import read_tensor
from shared.errors import CheckpointError

_LARGEST_E4M3 = 448.0
_CODES = 8  # codes of four bits in an int32


def read_numbers(tensors: CheckpointTensors, name: str) -> Tensor:
    """Raises CheckpointError for a weight that no code is near, and which would spoil the scale of
    others.
    """
    tensor = read_tensor(tensors, name)
    if not bool(tensor.isfinite().all()):
        raise CheckpointError(
            f"{tensors.path(name)}: tensor {name} has NaN or infinite weights, which no scale fits"
        )
    return tensor


def quantized_tensors(weight: Tensor, form: Int4 | Fp8Block) -> dict[str, Tensor]:
    """weight [N, K] -> its tensors by the ends of their names.

    Raises CheckpointError if groups do not fill a row.
    """
    match form:
        case Int4():
            return _int4(weight, form)
        case Fp8Block():
            return _fp8(weight)


def _int4(weight: Tensor, form: Int4) -> dict[str, Tensor]:
    num_rows, width = weight.shape
    grouped = weight.float().view(num_rows, num_groups(form, width), -1)
    largest, least = grouped.amax(2).clamp(min=0), grouped.amin(2).clamp(max=0)
    span = 2 * torch.maximum(largest, -least) if form.is_symmetric else largest - least
    scale = (span / 15).to(torch.bfloat16 if form.scale_dtype == "BF16" else torch.float32)
    divisor = torch.where(scale == 0, 1, scale.float())
    zero = torch.full_like(divisor, 8)
    if not form.is_symmetric:
        zero = (-least / divisor).round().clamp(0, 15)
    codes = (grouped / divisor.unsqueeze(2)).round().add(zero.unsqueeze(2)).clamp(0, 15)
    found = {
        "weight_packed": _packed(codes.view(num_rows, width)),
        "weight_scale": scale,
        "weight_shape": torch.tensor([num_rows, width]),
    }
    if not form.is_symmetric:
        found["weight_zero_point"] = _packed(zero.t()).t().contiguous()
    return found


def _packed(codes: Tensor) -> Tensor:
    """[n, m] -> int32 [n, ⌈m / 8⌉], eight codes a word, low nibble first."""
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % _CODES)).to(torch.int32)
    words = padded.reshape(len(codes), -1, _CODES) << 4 * torch.arange(_CODES, dtype=torch.int32)
    return words.sum(2).to(torch.int32)


def _fp8(weight: Tensor) -> dict[str, Tensor]:
    num_rows, width = weight.shape
    padding = (0, -width % FP8_BLOCK, 0, -num_rows % FP8_BLOCK)
    padded = torch.nn.functional.pad(weight.float(), padding)
    blocks = padded.view(len(padded) // FP8_BLOCK, FP8_BLOCK, -1, FP8_BLOCK)
    scale = blocks.abs().amax((1, 3)) / _LARGEST_E4M3
    divisor = torch.where(scale == 0, 1, scale)[:, None, :, None]
    scaled = (blocks / divisor).clamp(-_LARGEST_E4M3, _LARGEST_E4M3)
    codes = scaled.view(padded.shape)[:num_rows, :width].to(torch.float8_e4m3fn)
    return {"weight": codes.contiguous(), "weight_scale_inv": scale}

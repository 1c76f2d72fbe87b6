"""The form of a model's weights in memory, and the bytes that it saves.

dense         as the device computes with them
compressed    every matrix of a linear layer, of the embedding and of the output head that becomes
              smaller is stored compressed and decoded losslessly on use: see
              `kernels.ops.compress_weight`
auto          compressed if the checkpoint is a bundle and the device decodes as fast as it reads
              (CUDA, and CPUs with AMX), else dense
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from kernels.ops import QuantizedWeight, cpu_host, is_compressed, lane_parts
from shared.config import WEIGHT_FORMS
from shared.engine.codec.manifest import is_bundle
from shared.errors import ConfigError


class WeightsReport(msgspec.Struct, frozen=True, kw_only=True):
    """Counts weights by form. `bits_per_weight` and `verbatim_share` are of the compressed weights.

    A weight that would not become smaller, or is not BF16, stays dense.
    """

    num_compressed: int  # weights
    num_plain: int
    num_compressed_bytes: int
    num_plain_bytes: int
    num_quantized: int  # weights of four or eight bits in the checkpoint
    num_quantized_bytes: int
    bits_per_weight: float
    verbatim_share: float


def uses_compressed(
    weights: str, model_dir: Path, device: torch.device, load_format: str = "auto"
) -> bool:
    """Raises ConfigError. With "dummy" no file is read, so a bundle does not count."""
    if weights not in WEIGHT_FORMS:
        raise ConfigError(
            f"weights {weights!r} is none of {', '.join(WEIGHT_FORMS)}", param="weights"
        )
    if weights != "auto" or load_format == "dummy":
        return weights == "compressed"
    return is_bundle(model_dir) and (device.type != "cpu" or cpu_host().has_amx)


def weights_report(model: nn.Module) -> WeightsReport:
    found = [getattr(module, "weight", None) for module in model.modules()]
    compressed = {id(each): each for each in found if is_compressed(each)}.values()
    quantized = [each for each in found if isinstance(each, QuantizedWeight)]
    plain = (*model.parameters(), *found, *chain.from_iterable(map(lane_parts, found)))
    dense = {id(each): each for each in plain if isinstance(each, Tensor)}
    num_compressed = sum(each.numel() for each in compressed)
    num_bytes = sum(each.num_bytes for each in compressed)
    num_verbatim = sum(each.num_verbatim for each in compressed)
    return WeightsReport(
        num_compressed=num_compressed,
        num_plain=sum(each.numel() for each in dense.values()),
        num_compressed_bytes=num_bytes,
        num_plain_bytes=sum(each.numel() * each.element_size() for each in dense.values()),
        num_quantized=sum(each.numel() for each in quantized),
        num_quantized_bytes=sum(each.num_bytes for each in quantized),
        bits_per_weight=round(8 * num_bytes / max(num_compressed, 1), 3),
        verbatim_share=round(num_verbatim / max(num_compressed, 1), 5),
    )

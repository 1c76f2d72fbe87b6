"""The dtype in which a worker stores KV, from `--kv-dtype`, the checkpoint and the device."""

from __future__ import annotations

import structlog
import torch

from shared.engine.model_config.model_config import ModelConfig
from shared.errors import ConfigError
from shared.kv_layout import FP8
from shared.numerics import FP8_CAPABILITY, KV_DTYPES

log = structlog.get_logger(__name__)


def resolve_kv_dtype(given: str, dtype: str, config: ModelConfig, device: torch.device) -> str:
    """Returns torch's name of the KV dtype, for activations of `dtype`. Raises ConfigError.

    `auto` is FP8 for a checkpoint that declares it if the device has it, else the dtype
    of activations.
    """
    if given not in KV_DTYPES:
        raise _bad(f"{given!r} is none of {', '.join(KV_DTYPES)}")
    if given == "bf16":
        if dtype != "bfloat16":
            raise _bad(f"bf16 needs activations in bfloat16, not {dtype}: set dtype, or auto")
        return dtype
    reason = _reason_against_fp8(device)
    if given == "fp8":
        if reason is not None:
            raise _bad(f"fp8: {reason}")
        return FP8
    if not config.declares_fp8_kv:
        return dtype
    if reason is not None:
        log.warning("kv_dtype_not_used", declared="fp8", reason=reason, used=dtype)
        return dtype
    return FP8


def _reason_against_fp8(device: torch.device) -> str | None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        return "the device has a compute capability below 8.9"
    return None


def _bad(reason: str) -> ConfigError:
    return ConfigError(f"kv_dtype {reason}", param="kv_dtype")

"""The scales of an FP8 cache: a checkpoint's, or 1.0.

Keys and values are stored as x / scale. Names, below `model.layers.N.self_attn.`:

    k_scale, v_scale                                 compressed-tensors
    k_proj.output_scale, v_proj.output_scale         its older versions
    k_proj.k_scale, v_proj.v_scale                   ModelOpt
    attn.k_scale, attn.v_scale, qkv_proj.k_scale …   vLLM's module names
    kv_scale, attn.kv_scale                          one scale for both

A scale is one number, or one for each KV head. The rows of latent attention are keys and values at
once: they have the keys' scale.
"""

from __future__ import annotations

from math import prod

import structlog
import torch
from torch import Tensor

from shared.engine.layers.attention import PagedAttention
from shared.engine.model_config.checkpoint_form import KV_SCALE
from shared.engine.model_config.model_config import ModelConfig
from shared.engine.models.decoder import DecoderLayer, LayerStack
from shared.engine.parallel.cuts import WHOLE
from shared.engine.weights.weight_source import WeightSource
from shared.errors import CheckpointError
from shared.kv_layout import FP8, KvLayout

log = structlog.get_logger(__name__)

_PLANES = {"k": (0,), "v": (1,), "kv": (0, 1)}
_DTYPES = ("F32", "BF16", "F16")
# Every key saturates or becomes zero beyond these: |x| up to 448 · scale is stored in steps of at
# least 2^-9 · scale.
LEAST_SCALE, LARGEST_SCALE = 2.0**-24, 2.0**16


def read_kv_scales(tensors: WeightSource, config: ModelConfig) -> Tensor:
    """Returns FP32 [num_layers, 2, num_kv_heads], by the model's names; 1.0 for what is not there,
    with a warning if the checkpoint has others or declares an FP8 cache. Raises CheckpointError.
    """
    num_layers, num_kv_heads = config.num_layers, config.num_kv_heads
    scales = torch.ones(num_layers, 2, num_kv_heads)
    sources: dict[tuple[int, int], str] = {}
    for name in tensors.names():
        found = KV_SCALE.fullmatch(name)
        if found is None or int(found[1]) >= num_layers:
            continue
        layer, values = int(found[1]), _read(tensors, name, num_kv_heads)
        for plane in _PLANES[found[2] or found[3]]:
            other = sources.setdefault((layer, plane), name)
            if other != name:
                raise CheckpointError(
                    f"{tensors.path(name)}: tensors {other} and {name} are both a scale of KV"
                )
            scales[layer, plane] = values
    planes = (0,) if config.latent is not None else (0, 1)
    _log(sources, scales[:, planes], is_declared=config.declares_fp8_kv)
    if config.latent is not None:
        _use_scales_of_keys(scales)
    return scales


def _read(tensors: WeightSource, name: str, num_kv_heads: int) -> Tensor:
    """[1] or [num_kv_heads]"""
    dtype, shape = tensors.info(name)
    where = f"{tensors.path(name)}: tensor {name}"
    if dtype not in _DTYPES:
        raise CheckpointError(f"{where} is {dtype}; scales are {', '.join(_DTYPES)}")
    if prod(shape) not in (1, num_kv_heads):
        raise CheckpointError(
            f"{where} has shape {list(shape)}: it is neither one scale nor one for each of "
            f"{num_kv_heads} KV heads"
        )
    values = torch.empty(shape)
    tensors.read_into(name, WHOLE, values)
    if not bool(((values >= LEAST_SCALE) & (values <= LARGEST_SCALE)).all()):
        raise CheckpointError(
            f"{where} is {values.flatten().tolist()}: scales of KV are between {LEAST_SCALE:.1e} "
            f"and {LARGEST_SCALE:.1e}"
        )
    return values.view(-1)


def _use_scales_of_keys(scales: Tensor) -> None:
    """Uses the scales of keys for values of latents. Changes `scales`."""
    keys, values = scales.unbind(1)
    num_other = int(((values != 1) & (values != keys)).any(1).sum())
    if num_other:
        log.warning("kv_scales_not_used", count=num_other, of="values", used="those of keys")
    values.copy_(keys)


def _log(sources: dict[tuple[int, int], str], scales: Tensor, *, is_declared: bool) -> None:
    """scales [num_layers, planes that have their own, num_kv_heads]"""
    num_layers, planes = scales.shape[:2]
    needed = [(layer, plane) for layer in range(num_layers) for plane in range(planes)]
    missing = [key for key in needed if key not in sources]
    if missing and (sources or is_declared):
        layer, plane = missing[0]
        log.warning(
            "kv_scales_missing", count=len(missing), layer=layer, of=("keys", "values")[plane]
        )
    log.info(
        "kv_scales",
        of_checkpoint=len(sources),
        smallest=float(scales.min()),
        largest=float(scales.max()),
    )


def load_kv_scales(
    model: LayerStack, tensors: WeightSource, config: ModelConfig, kv_layout: KvLayout
) -> None:
    """Gives the attention of a whole model its scales, if the cache is in FP8. Call it before
    `fuse`. Raises CheckpointError.
    """
    if kv_layout.dtype == FP8:
        set_kv_scales(model, read_kv_scales(tensors, config))


def set_kv_scales(model: LayerStack, scales: Tensor) -> None:
    """scales [layers of the model, 2, num_kv_heads]"""
    for layer, own in zip(model.layers, scales, strict=True):
        assert isinstance(layer, DecoderLayer)
        assert isinstance(layer.self_attn, PagedAttention)
        layer.self_attn.kv_scales = own.contiguous().to(model.cos.device)

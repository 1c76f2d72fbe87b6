"""Gives the layers of a model on CUDA the library that computes the attention of prompts."""

from __future__ import annotations

import torch
from torch import nn

from kernels.device import compute_capability
from shared.engine.executors.loading.load_options import LoadOptions
from shared.engine.layers.attention import PagedAttention
from shared.engine.layers.attention_backends.choice import (
    AttentionState,
    CudnnFacts,
    choose_library,
)
from shared.engine.models.decoder import Decoder
from shared.kv_layout import KvLayout


def set_library(
    model: Decoder, layout: KvLayout, options: LoadOptions, device: torch.device
) -> None:
    """Call it on the thread of the device, once kernels are compiled: the probe launches some."""
    library = choose_library(
        *(options.attention, _state(model, layout), options.mode, device),
        lambda: CudnnFacts.found(compute_capability(device)),
    )
    for module in model.modules():
        if isinstance(module, PagedAttention):
            module.library = library


def library_name(model: nn.Module) -> str:
    """Returns "cudnn" or "triton"."""
    of_layers = (each for each in model.modules() if isinstance(each, PagedAttention))
    library = next(of_layers).library
    return "triton" if library is None or library.failure else "cudnn"


def _state(model: Decoder, layout: KvLayout) -> AttentionState:
    config = model.config
    return AttentionState(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=layout.block_size,
        dtype=model.dtype,
        kv_dtype=getattr(torch, layout.dtype),
        scale=config.attention_scale,
        has_reach=any(layer.reach is not None for layer in config.layers),
        has_softcap=config.attention_softcap is not None,
        is_latent=config.latent is not None,
    )

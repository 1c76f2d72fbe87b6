"""Gives the layers of a model on CUDA the libraries that compute in place of our own kernels, where
they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import structlog
import torch
from torch import nn

from kernels.device import compute_capability
from shared.config import AttentionChoice, ExpertKernels
from shared.engine.executors.cuda.cuda_device import CudaDevice, is_out_of_memory
from shared.engine.executors.loading.load_options import LoadOptions
from shared.engine.layers.attention import PagedAttention
from shared.engine.layers.attention_backends.choice import (
    AttentionState,
    CudnnFacts,
    choose_library,
)
from shared.engine.layers.moe import LIBRARY_ROWS, MoeMlp
from shared.engine.models.decoder import Decoder
from shared.errors import ConfigError
from shared.kv_layout import KvLayout

log = structlog.get_logger(__name__)


def set_libraries(
    model: Decoder, layout: KvLayout, options: LoadOptions, device: CudaDevice
) -> None:
    """Call it on the thread of the device, once kernels are compiled: a probe launches some. Raises
    ConfigError if the probe has left the device unusable for this process.
    """
    with _reporting_probe(options.attention, device):
        _set_attention(model, layout, options, device.tensors_on)
    _set_expert_kernels(model, options.expert_kernels)


@contextmanager
def _reporting_probe(attention: AttentionChoice, device: CudaDevice) -> Iterator[None]:
    """Raises ConfigError, not what the next launch would: an error of a kernel stays with CUDA."""
    try:
        yield
        if attention == "cudnn":
            device.driver.synchronize()
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"the device failed in the probe of attention {attention!r}: {reason}; start with "
            "another one",
            param="attention",
        ) from error


def _set_attention(
    model: Decoder, layout: KvLayout, options: LoadOptions, device: torch.device
) -> None:
    library = choose_library(
        options.attention,
        _state(model, layout),
        options.mode,
        device,
        lambda: CudnnFacts.found(compute_capability(device)),
    )
    for module in model.modules():
        if isinstance(module, PagedAttention):
            module.library = library


def _set_expert_kernels(model: Decoder, choice: ExpertKernels) -> None:
    mlps = [module for module in model.modules() if isinstance(module, MoeMlp)]
    if choice != "grouped" or not mlps:
        return
    reasons = {mlp.use_library() for mlp in mlps} - {""}
    if reasons:
        log.warning("expert_kernels", used="triton", reason=f"not grouped: {', '.join(reasons)}")
    else:
        log.info("expert_kernels", used="grouped", from_rows=LIBRARY_ROWS)


def attention_name(model: nn.Module) -> str:
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
        has_sinks=config.has_sinks,
        is_latent=config.latent is not None,
    )

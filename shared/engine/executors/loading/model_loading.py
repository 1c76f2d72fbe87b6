"""The device-independent part of loading a model: options, formats, the source of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog
import torch

from shared.config import LOAD_FORMATS
from shared.engine.layers.attention import PagedAttention
from shared.engine.layers.latent_attention import LatentExpansion
from shared.engine.layers.linear import MatmulModule, MatrixModule, weights_unset_on
from shared.engine.layers.moe import MoeMlp
from shared.engine.model_config.model_config import LayerConfig, ModelConfig
from shared.engine.models.decoder import Decoder, LayerStack
from shared.engine.weights.checkpoint_files import Reading
from shared.engine.weights.checkpoint_tensors import FormedTensors
from shared.engine.weights.dummy_weights import DummyTensors
from shared.engine.weights.load import open_checkpoint, weights_digest
from shared.engine.weights.quantized_tensors import QuantizedTensors
from shared.engine.weights.reading.digest_cache import digest_cache
from shared.engine.weights.reading.staging import LocalStaging, WeightStaging
from shared.engine.weights.weight_form import weights_report
from shared.engine.weights.weight_source import WeightSource
from shared.errors import CheckpointError, ConfigError
from shared.kv_layout import KvLayout, LatentKv, LayerState, PagedKv, Reach, group_layers
from shared.numerics import Activations, Mode

log = structlog.get_logger(__name__)

DTYPES = ("bfloat16", "float32", "float16")


def resolve_dtype(dtype: str, device: torch.device) -> str:
    """Returns the dtype of a name. 'auto' is BF16 if the hardware multiplies it natively, else
    FP32. Raises ConfigError.
    """
    if dtype == "auto":
        if device.type == "cuda":
            return "bfloat16"
        capabilities = torch.cpu.get_capabilities()
        has_bf16 = capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")
        return "bfloat16" if has_bf16 else "float32"
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is none of auto, {', '.join(DTYPES)}", param="dtype")
    return dtype


def kv_layout_of(config: ModelConfig, dtype: str, block_size: int) -> KvLayout:
    """Returns the layout of a cache that stores KV as `dtype`. Raises ConfigError."""
    if block_size < 1:
        raise ConfigError(f"block_size {block_size} must be positive", param="block_size")
    states = [_layer_state(config, layer, dtype) for layer in config.layers]
    return KvLayout(group_layers(states), block_size, hash_tokens=block_size)


def _layer_state(config: ModelConfig, layer: LayerConfig, dtype: str) -> LayerState:
    if config.latent is not None:
        return LatentKv(config.latent.kv_rank, config.latent.rope_dim, dtype)
    reach = _bounded_reach(config, layer.reach)
    return PagedKv(config.num_kv_heads, config.head_dim, dtype, reach)


def _bounded_reach(config: ModelConfig, reach: Reach) -> Reach:
    """Returns the reach, or None if it is longer than every context."""
    if reach is not None and reach.tokens >= config.max_position_embeddings:
        return None
    return reach


def empty_model(
    model_dir: Path,
    config: ModelConfig,
    dtype: str,
    device: torch.device,
    *,
    num_positions: int,
    weights_on: torch.device | None = None,
) -> Decoder:
    """Returns a model with unset weights, allocated on the device, or on `weights_on`. Raises
    torch.OutOfMemoryError on CUDA, and CheckpointError elsewhere, if it is too large.
    """
    try:
        with device, weights_unset_on(weights_on or device):
            model = Decoder(config, dtype=getattr(torch, dtype), num_positions=num_positions)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, MemoryError) as error:  # torch's errors on the CPU
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"{model_dir}: too large for this machine: {reason}") from None
    return model.eval()


@dataclass(frozen=True, slots=True)
class OpenedWeights:
    """A model's tensors by its names, and as they are stored. `described` are other inputs that
    determine the weights.
    """

    tensors: WeightSource
    stored: WeightSource
    described: bytes
    revision: Callable[[], str]


@contextmanager
def open_weights(
    model_dir: Path,
    config: ModelConfig,
    model: Decoder,
    load_format: str,
    *,
    staging: WeightStaging | None = None,
    readers: Executor | None = None,
) -> Iterator[OpenedWeights]:
    """Opens the model's weights; `readers` compute digests. Raises CheckpointError, and ConfigError
    for an unknown format.
    """
    described = msgspec.json.encode(config)
    if load_format not in LOAD_FORMATS:
        raise ConfigError(
            f"load_format {load_format!r} is none of {', '.join(LOAD_FORMATS)}", param="load_format"
        )
    if load_format == "dummy":
        norm_weight = 0.0 if config.has_unit_offset_norms else 1.0
        dummy = DummyTensors(model_dir, model.weight_destinations(), norm_weight=norm_weight)
        described += dummy.identity.encode()
        yield OpenedWeights(dummy, dummy, described, lambda: weights_digest(dummy, described))
        return
    reading = Reading(staging or LocalStaging(), digest_cache())
    with open_checkpoint(model_dir, reading) as tensors:

        def revision() -> str:
            found = weights_digest(tensors, described, readers)
            tensors.check_unchanged()
            return found

        formed = FormedTensors(tensors, config.checkpoint)
        if formed.dropped:
            log.info("tensors_not_used", count=len(formed.dropped), first=formed.dropped[0])
        read: WeightSource = formed
        if (formats := config.layers[0].formats) is not None:
            destinations = model.weight_destinations()
            read = QuantizedTensors(formed, formats.quantization, destinations)
        yield OpenedWeights(read, tensors, described, revision)


def finish_model(
    model: LayerStack, mode: Mode, *, is_compressed: bool, activations: Activations = "plain"
) -> None:
    """Packs the weights of a filled model for the device, and fuses its layers."""
    if is_compressed:
        log.info("weights_compressed", **msgspec.structs.asdict(weights_report(model)))
    for module in model.modules():
        if isinstance(module, MatmulModule | LatentExpansion):
            module.pack()
    if model.layer_config.is_quantized:
        report = weights_report(model)
        log.info(
            "weights_quantized", num=report.num_quantized, num_bytes=report.num_quantized_bytes
        )
    if activations == "bf16-exchange" and isinstance(model, Decoder):
        model.round_sums()
    model.fuse()
    set_mode(model, mode)


def set_mode(model: LayerStack, mode: Mode) -> None:
    for module in model.modules():
        if isinstance(module, MatrixModule):
            module.set_batch_invariance(is_batch_invariant=mode == "exact")
        elif isinstance(module, PagedAttention | LatentExpansion | MoeMlp):
            module.is_batch_invariant = mode == "exact"

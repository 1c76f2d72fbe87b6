"""Reads `config.json` and `generation_config.json` of a checkpoint folder, in both spellings.

transformers 4 writes `rope_theta`, `rope_scaling`, `torch_dtype`; transformers 5 writes
`rope_parameters` and `dtype`. transformers itself is not imported: that costs seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from shared.errors import CheckpointError

Positive = Annotated[int, msgspec.Meta(gt=0)]
ROPE_TYPES = ("default", "linear", "llama3")


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`factor` and the rest are those of the llama3 and linear scalings."""

    rope_type: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    has_attention_bias: bool
    has_mlp_bias: bool
    has_tied_embeddings: bool
    eos_token_ids: tuple[int, ...]


class _RawRope(msgspec.Struct):
    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float = 1.0


class _RawConfig(msgspec.Struct):
    vocab_size: Positive
    hidden_size: Positive
    intermediate_size: Positive
    num_hidden_layers: Positive
    num_attention_heads: Positive
    architectures: list[str] | None = None
    num_key_value_heads: Positive | None = None
    head_dim: Positive | None = None
    max_position_embeddings: Positive = 2048
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    rope_theta: float | None = None
    rope_scaling: _RawRope | None = None
    rope_parameters: _RawRope | None = None
    partial_rotary_factor: float = 1.0
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    eos_token_id: int | list[int] | None = None
    quantization_config: dict[str, Any] | None = None


class _RawGeneration(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


_Raw = TypeVar("_Raw", _RawConfig, _RawGeneration)


def read_config(model_dir: Path) -> ModelConfig:
    """Raises CheckpointError, in one line, for what is missing, unreadable or unsupported."""
    path = model_dir / "config.json"
    raw = _read(path, _RawConfig)
    _refuse_unsupported(raw, path)
    num_kv_heads = raw.num_key_value_heads
    if num_kv_heads is None:
        num_kv_heads = raw.num_attention_heads
    if raw.num_attention_heads % num_kv_heads:
        raise CheckpointError(
            f"{path}: {raw.num_attention_heads} attention heads cannot share "
            f"{num_kv_heads} KV heads"
        )
    return ModelConfig(
        architecture=raw.architectures[0] if raw.architectures else "",
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        intermediate_size=raw.intermediate_size,
        num_layers=raw.num_hidden_layers,
        num_heads=raw.num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(raw, path),
        max_position_embeddings=raw.max_position_embeddings,
        rms_norm_eps=raw.rms_norm_eps,
        rope=_rope(raw, path),
        has_attention_bias=raw.attention_bias,
        has_mlp_bias=raw.mlp_bias,
        has_tied_embeddings=raw.tie_word_embeddings,
        eos_token_ids=_eos_token_ids(model_dir, raw),
    )


def _read(path: Path, kind: type[_Raw]) -> _Raw:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: {error}") from None


def _refuse_unsupported(raw: _RawConfig, path: Path) -> None:
    if raw.hidden_act != "silu":
        raise CheckpointError(f"{path}: hidden_act {raw.hidden_act!r} is not supported, only silu")
    if raw.quantization_config is not None:
        raise CheckpointError(f"{path}: quantized checkpoints (quantization_config) not supported")
    if raw.partial_rotary_factor != 1.0:
        raise CheckpointError(f"{path}: partial_rotary_factor is not supported")


def _head_dim(raw: _RawConfig, path: Path) -> int:
    head_dim = raw.head_dim
    if head_dim is None:
        if raw.hidden_size % raw.num_attention_heads:
            raise CheckpointError(
                f"{path}: hidden_size {raw.hidden_size} is no multiple of "
                f"{raw.num_attention_heads} attention heads and head_dim is not given"
            )
        head_dim = raw.hidden_size // raw.num_attention_heads
    if head_dim % 2:
        raise CheckpointError(f"{path}: head_dim {head_dim} is odd; rotary embedding needs pairs")
    return head_dim


def _rope(raw: _RawConfig, path: Path) -> RopeConfig:
    given = raw.rope_parameters
    if given is None:
        given = raw.rope_scaling if raw.rope_scaling is not None else _RawRope()
    rope_type = given.rope_type if given.rope_type is not None else given.type
    if rope_type is None:
        rope_type = "default"
    if rope_type not in ROPE_TYPES:
        raise CheckpointError(
            f"{path}: rope type {rope_type!r} is not supported, only {', '.join(ROPE_TYPES)}"
        )
    theta = given.rope_theta if given.rope_theta is not None else raw.rope_theta
    original = given.original_max_position_embeddings
    if original is None:
        original = raw.max_position_embeddings
    if given.partial_rotary_factor != 1.0:
        raise CheckpointError(f"{path}: partial_rotary_factor is not supported")
    if given.factor <= 0 or (
        rope_type == "llama3" and given.high_freq_factor <= given.low_freq_factor
    ):
        raise CheckpointError(f"{path}: rope factors are out of range")
    return RopeConfig(
        rope_type=rope_type,
        theta=10_000.0 if theta is None else theta,
        factor=given.factor,
        low_freq_factor=given.low_freq_factor,
        high_freq_factor=given.high_freq_factor,
        original_max_position_embeddings=original,
    )


def _eos_token_ids(model_dir: Path, raw: _RawConfig) -> tuple[int, ...]:
    """generation_config.json wins, as in transformers' generate."""
    eos = raw.eos_token_id
    path = model_dir / "generation_config.json"
    if path.exists():
        generation = _read(path, _RawGeneration)
        eos = generation.eos_token_id if generation.eos_token_id is not None else eos
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)

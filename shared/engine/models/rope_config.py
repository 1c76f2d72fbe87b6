"""The rotary embedding of a checkpoint's config.

In transformers the frequencies of `dynamic` and `longrope` depend on the length of each sequence.
Cached keys are rotated once and shared between sequences, so here the frequencies are fixed by the
longest context served, which is the config's `max_position_embeddings` on every worker:

- `longrope` uses the long factors if that context is longer than the original one, else the short
  ones (like vLLM). transformers differs for sequences within the original context of such a
  checkpoint: it uses the short factors there.
- `dynamic` scales the base for that context, which leaves it unchanged. transformers differs only
  above `max_position_embeddings`, and longer sequences are not served.

`yarn` does not depend on the length. Its context is `factor` times its original context, even if
`max_position_embeddings` is the original one (like vLLM).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from shared.engine.model_config.model_config import (
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    RopeConfig,
    YarnScaling,
)
from shared.errors import CheckpointError

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


class RopeFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of `rope_parameters` or `rope_scaling`, with the config's context and head_dim."""

    max_position_embeddings: int
    head_dim: int
    rope_theta: float
    rope_type: str = "default"
    partial_rotary_factor: float = 1.0
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def original_context(self) -> int:
        original = self.original_max_position_embeddings
        return self.max_position_embeddings if original is None else original


def rope_fields(written: Mapping[str, Any]) -> RopeFields:
    """Reads rope parameters. `written` has the names of RopeFields, or `type` for `rope_type`; None
    means missing.
    """
    known = {name: value for name, value in written.items() if value is not None}
    known.setdefault("rope_type", known.get("type", "default"))
    try:
        return msgspec.convert(known, RopeFields)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"rope parameters: {error}") from None


def served_context(fields: RopeFields) -> int:
    """Returns the longest context served, in tokens."""
    context, original = fields.max_position_embeddings, fields.original_max_position_embeddings
    if fields.rope_type != "yarn" or original is None:
        return context
    return max(context, int(_stretch(fields) * original))


def rope_config(fields: RopeFields) -> RopeConfig:
    """Returns the rope of a model's config. Raises CheckpointError for a type or for values that
    are not supported.
    """
    _reject_unsupported(fields)
    rope = RopeConfig(theta=fields.rope_theta, rotary_dim=fields.rotary_dim)
    match fields.rope_type:
        case "linear":
            return msgspec.structs.replace(rope, scaling=LinearScaling(factor=_factor(fields)))
        case "dynamic":
            return msgspec.structs.replace(
                rope, theta=dynamic_theta(fields, served_context(fields))
            )
        case "llama3":
            return msgspec.structs.replace(rope, scaling=_llama3(fields))
        case "yarn":
            return msgspec.structs.replace(
                rope, scaling=_yarn(fields), attention_factor=_yarn_attention_factor(fields)
            )
        case "longrope":
            return msgspec.structs.replace(
                rope,
                scaling=_longrope(fields, served_context(fields)),
                attention_factor=_longrope_attention_factor(fields),
            )
    return rope


def _reject_unsupported(fields: RopeFields) -> None:
    if fields.rope_type not in ROPE_TYPES:
        raise CheckpointError(
            f"rope type {fields.rope_type!r} is not supported, only {', '.join(ROPE_TYPES)}"
        )
    if not 0 < fields.rotary_dim <= fields.head_dim or fields.rotary_dim % 2:
        raise CheckpointError(
            f"partial_rotary_factor {fields.partial_rotary_factor} of head_dim {fields.head_dim} "
            f"leaves no pairs to rotate"
        )
    betas = (beta for beta in (fields.beta_fast, fields.beta_slow) if beta is not None)
    if fields.rope_theta <= 1 or fields.original_context <= 1 or any(beta <= 0 for beta in betas):
        raise CheckpointError("rope parameters are out of range")


def _factor(fields: RopeFields) -> float:
    if fields.factor is None or fields.factor <= 0:
        raise CheckpointError(f"rope type {fields.rope_type!r} needs a factor above 0")
    return fields.factor


def _stretch(fields: RopeFields) -> float:
    """Returns the factor; if it is missing, the ratio of the context to the original context."""
    if fields.factor is None and fields.original_max_position_embeddings is not None:
        return fields.max_position_embeddings / fields.original_context
    return _factor(fields)


def dynamic_theta(fields: RopeFields, context: int) -> float:
    """Returns the NTK-aware theta: a larger base, so that the slowest pair turns equally far
    within `context`.
    """
    factor, limit, dim = _factor(fields), fields.max_position_embeddings, fields.rotary_dim
    if dim == 2:
        raise CheckpointError("rope type 'dynamic' needs more than one pair to rotate")
    growth = factor * max(context, limit) / limit - (factor - 1)
    return float(fields.rope_theta * growth ** (dim / (dim - 2)))


def _llama3(fields: RopeFields) -> Llama3Scaling:
    low, high = fields.low_freq_factor, fields.high_freq_factor
    if not 0 < low <= high:
        raise CheckpointError(
            f"low_freq_factor {low} and high_freq_factor {high} of the rope must be positive, the"
            " low one not above the high one"
        )
    return Llama3Scaling(
        factor=_factor(fields),
        low_freq_factor=fields.low_freq_factor,
        high_freq_factor=fields.high_freq_factor,
        original_context=fields.original_context,
    )


def _yarn(fields: RopeFields) -> YarnScaling:
    return YarnScaling(
        factor=_stretch(fields),
        beta_fast=32 if fields.beta_fast is None else fields.beta_fast,
        beta_slow=1 if fields.beta_slow is None else fields.beta_slow,
        is_truncated=fields.truncate,
        original_context=fields.original_context,
    )


def _yarn_attention_factor(fields: RopeFields) -> float:
    if fields.attention_factor is not None:
        return fields.attention_factor
    factor = _stretch(fields)
    if fields.mscale and fields.mscale_all_dim:  # like transformers: 0 means missing
        return _mscale(factor, fields.mscale) / _mscale(factor, fields.mscale_all_dim)
    return _mscale(factor, 1.0)


def softmax_mscale(fields: RopeFields) -> float:
    """Returns the factor of queries and of keys, besides the factor of cos and sin
    (DeepSeek V2).
    """
    if fields.rope_type == "default" or not fields.mscale_all_dim:
        return 1.0
    return _mscale(_factor(fields), fields.mscale_all_dim)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _longrope(fields: RopeFields, context: int) -> LongScaling:
    for factors in (fields.short_factor, fields.long_factor):
        if len(factors) != fields.rotary_dim // 2 or min(factors) <= 0:
            raise CheckpointError(
                f"rope type 'longrope' needs {fields.rotary_dim // 2} positive numbers each in "
                f"short_factor and long_factor"
            )
    is_long = context > fields.original_context
    return LongScaling(fields.long_factor if is_long else fields.short_factor)


def _longrope_attention_factor(fields: RopeFields) -> float:
    if fields.attention_factor is not None:
        return fields.attention_factor
    factor = _stretch(fields)
    if factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(fields.original_context))

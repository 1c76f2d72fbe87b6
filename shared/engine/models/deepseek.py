"""DeepSeek V3 (R1, V3.1) and Kimi K2: multi-head latent attention, experts after the first layers.

`model_type: kimi_k2` has the same tensors. Kimi K2.5 has such a model beside an image encoder, and
is served for text only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from shared.engine.model_config.checkpoint_form import TEXT_PART, CheckpointForm, PairedRows
from shared.engine.model_config.model_config import LatentConfig, ModelConfig
from shared.engine.models.config_fields import (
    ConfigFields,
    Width,
    config_fields,
    decoder_config,
    layer_ropes,
    text_fields,
)
from shared.engine.models.moe.fields import with_deepseek_experts
from shared.engine.models.rope_config import softmax_mscale
from shared.errors import CheckpointError

_VISION = r"(model\.)?(vision_tower|mm_projector|multi_modal_projector)\."


class LatentFields(msgspec.Struct, frozen=True, kw_only=True):
    """The defaults are those of DeepSeek V3."""

    q_lora_rank: Width | None = 1536
    kv_lora_rank: Width = 512
    qk_nope_head_dim: Width = 128
    qk_rope_head_dim: Width = 64
    v_head_dim: Width = 128
    rope_interleave: bool | None = True


def configure(given: Mapping[str, Any]) -> ModelConfig:
    latent = _latent_fields(given)
    fields = config_fields(given, max_position_embeddings=4096)
    _expect_own_keys(fields)
    rotated = replace(fields, head_dim=latent.qk_rope_head_dim, num_key_value_heads=None)
    head_dim = latent.qk_nope_head_dim + latent.qk_rope_head_dim
    config = replace(
        decoder_config(rotated),
        num_kv_heads=1,
        head_dim=head_dim,
        attention_scale=head_dim**-0.5 * softmax_mscale(layer_ropes(rotated)[0]) ** 2,
        latent=LatentConfig(
            kv_rank=latent.kv_lora_rank,
            nope_dim=latent.qk_nope_head_dim,
            rope_dim=latent.qk_rope_head_dim,
            value_dim=latent.v_head_dim,
            query_rank=latent.q_lora_rank,
        ),
        has_qkv_bias=fields.attention_bias,
        has_output_bias=fields.attention_bias,
        checkpoint=CheckpointForm(paired=_paired_rows(latent)),
    )
    return with_deepseek_experts(
        config,
        given,
        n_routed_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
        n_shared_experts=1,
        n_group=8,
        topk_group=4,
        routed_scaling_factor=2.5,
        first_k_dense_replace=3,
        num_nextn_predict_layers=1,
    )


def configure_text_part(given: Mapping[str, Any]) -> ModelConfig:
    """Returns the text part of Kimi K2.5, which is served for text only."""
    config = configure({"tie_word_embeddings": False, **text_fields(given)})
    form = replace(
        config.checkpoint,
        renames=TEXT_PART.renames,
        dropped=(_VISION, *(rf"language_model\.{each}" for each in config.checkpoint.dropped)),
    )
    return replace(config, checkpoint=form)


def _latent_fields(given: Mapping[str, Any]) -> LatentFields:
    try:
        fields = msgspec.convert(given, LatentFields)
    except msgspec.ValidationError as error:
        raise CheckpointError(str(error)) from None
    if fields.qk_rope_head_dim % 2:
        raise CheckpointError(
            f"qk_rope_head_dim {fields.qk_rope_head_dim} is odd; rotary embedding needs pairs"
        )
    return fields


def _expect_own_keys(fields: ConfigFields) -> None:
    """Every head expands the latent to keys of its own."""
    if fields.num_key_value_heads not in (None, fields.num_attention_heads):
        raise CheckpointError(
            f"num_key_value_heads {fields.num_key_value_heads} is not num_attention_heads "
            f"{fields.num_attention_heads}: latents have a key for each head"
        )


def _paired_rows(latent: LatentFields) -> tuple[tuple[str, PairedRows], ...]:
    """Returns patterns of tensors with their rows whose pairs are adjacent. If `rope_interleave` is
    false, the rows are in two halves already.
    """
    if latent.rope_interleave is False:
        return ()
    nope, rope, rank = latent.qk_nope_head_dim, latent.qk_rope_head_dim, latent.kv_lora_rank
    attention = r"model\.layers\.\d+\.self_attn\."
    return (
        (
            attention + r"(q_proj|q_b_proj)\.weight",
            PairedRows(head=nope + rope, first=nope, dim=rope),
        ),
        (
            attention + r"kv_a_proj_with_mqa\.(weight|bias)",
            PairedRows(head=rank + rope, first=rank, dim=rope),
        ),
    )

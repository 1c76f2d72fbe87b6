"""The description of a decoder of any family: everything that the layers depend on."""

from __future__ import annotations

import msgspec

from shared.engine.model_config.checkpoint_form import CheckpointForm
from shared.engine.model_config.moe_config import MoeConfig
from shared.engine.model_config.quantization import LayerFormats
from shared.engine.model_config.vision_config import VisionConfig
from shared.kv_layout import Reach


class LinearScaling(msgspec.Struct, frozen=True, kw_only=True, tag="linear"):
    factor: float


class Llama3Scaling(msgspec.Struct, frozen=True, kw_only=True, tag="llama3"):
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


class YarnScaling(msgspec.Struct, frozen=True, kw_only=True, tag="yarn"):
    factor: float
    beta_fast: float
    beta_slow: float
    is_truncated: bool
    original_context: int


class LongScaling(msgspec.Struct, frozen=True, tag="longrope"):
    factors: tuple[float, ...]  # [rotary_dim / 2]


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary positions: `rotary_dim` elements of a head are rotated; `attention_factor` multiplies
    cos and sin.
    """

    theta: float
    rotary_dim: int
    attention_factor: float = 1.0
    scaling: LinearScaling | Llama3Scaling | YarnScaling | LongScaling | None = None


class LatentConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Multi-head latent attention: a token's keys and values are one latent of `kv_rank` elements,
    and `rope_dim` elements of key with its position, which all heads share.

    A head's query has `nope_dim` elements without a position, and then `rope_dim`. `query_rank`
    None: one product instead of two of low rank.
    """

    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    query_rank: int | None = None


class QueryTemperature(msgspec.Struct, frozen=True, kw_only=True):
    """Queries at position p are multiplied by log1p(floor((p + 1) / floor_scale)) * scale + 1.

    Scalable-Softmax (Nakanishi 2025), as in Llama 4: attention over more keys stays as sharp.
    """

    floor_scale: float
    scale: float


class LayerConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One decoder layer. Its attention sees `reach`; `rope_index` indexes `ropes`, None: no
    rotation; the weights have `formats`, None: dense.

    Experts (`moe`) replace the dense MLP, whose size is the model's `intermediate_size`.
    """

    reach: Reach = None
    rope_index: int | None = 0
    query_temperature: QueryTemperature | None = None
    has_weightless_qk_norm: bool = False
    formats: LayerFormats | None = None
    moe: MoeConfig | None = None


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A model's shape. `max_position_embeddings` is the longest context served, in tokens. Without
    `has_head` the checkpoint has no output head: it gives embeddings, and its logits mean nothing.

    The revision of weights depends on the encoded config: a new field needs a default.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    activation: str
    attention_scale: float
    layers: tuple[LayerConfig, ...]
    ropes: tuple[RopeConfig, ...]  # all with the same rotary_dim
    has_tied_embeddings: bool
    architecture: str = ""
    eos_token_ids: tuple[int, ...] = ()
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    has_post_norms: bool = False  # a norm also after attention and MLP
    has_unit_offset_norms: bool = False  # the checkpoint stores a norm's weight minus 1
    has_norms_rounded_once: bool = False  # after the product with the weight, not before it, too
    has_sinks: bool = False  # a score of each head for a key whose value is zero
    has_fused_projections: bool = False  # the checkpoint has qkv_proj and gate_up_proj
    checkpoint: CheckpointForm = CheckpointForm()
    embedding_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    has_head: bool = True
    latent: LatentConfig | None = None  # then head_dim is of queries, and num_kv_heads 1
    declares_fp8_kv: bool = False  # the checkpoint is made for a cache in FP8
    vision: VisionConfig | None = None  # its image encoder; None: it takes no images

    @property
    def output_dim(self) -> int:
        """Elements of a head of attention's output."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def is_quantized(self) -> bool:
        return any(layer.formats is not None for layer in self.layers)

    @property
    def has_experts(self) -> bool:
        return self.moe is not None

    @property
    def moe(self) -> MoeConfig | None:
        """The experts of all layers that have some."""
        return next((layer.moe for layer in self.layers if layer.moe is not None), None)

    @property
    def has_dense_mlps(self) -> bool:
        return any(layer.moe is None for layer in self.layers)

"""The fields of `config.json` that the supported families share, in both versions.

transformers 4 writes `rope_theta` and `rope_scaling`; transformers 5 writes `rope_parameters`, with
one dict per layer type if they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec

from shared.engine.model_config.model_config import LayerConfig, ModelConfig
from shared.engine.models.rope_config import RopeFields, rope_config, rope_fields, served_context
from shared.errors import CheckpointError
from shared.kv_layout import Reach, Window

# Limits far above any model: a larger value is an error instead of exhausting the memory.
Positive = Annotated[int, msgspec.Meta(gt=0, lt=2**31)]
Width = Annotated[int, msgspec.Meta(gt=0, le=2**20)]
NumLayers = Annotated[int, msgspec.Meta(gt=0, le=4096)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]
FULL, SLIDING = "full_attention", "sliding_attention"
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
    # other spellings of the same function
    "gelu_python_tanh": "gelu_pytorch_tanh",
    "gelu_new": "gelu_pytorch_tanh",
    "gelu_fast": "gelu_pytorch_tanh",
    "gelu_accurate": "gelu_pytorch_tanh",
}
DEFAULT_THETA = 10_000.0


class ConfigFields(msgspec.Struct, frozen=True, kw_only=True):
    vocab_size: Annotated[int, msgspec.Meta(gt=0, le=2**24)]
    hidden_size: Width
    intermediate_size: Width
    num_hidden_layers: NumLayers
    num_attention_heads: Width
    num_key_value_heads: Width | None = None
    head_dim: Width | None = None
    max_position_embeddings: Positive = 2048
    original_max_position_embeddings: Positive | None = None
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    hidden_activation: str | None = None
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_local_base_freq: float | None = None
    partial_rotary_factor: float | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    sliding_window: Positive | None = None
    use_sliding_window: bool = False
    max_window_layers: int = 28
    sliding_window_pattern: Positive = 6
    layer_types: tuple[str, ...] | None = None
    query_pre_attn_scalar: PositiveFloat = 256.0
    attn_logit_softcapping: PositiveFloat | None = None
    final_logit_softcapping: PositiveFloat | None = None
    use_bidirectional_attention: bool | None = None
    is_causal: bool | None = None


def config_fields(given: Mapping[str, Any], **defaults: Any) -> ConfigFields:
    """Reads the fields of config.json. `defaults` are the family's values for fields that its
    checkpoints may omit.
    """
    try:
        fields = msgspec.convert(with_defaults(given, defaults), ConfigFields)
    except msgspec.ValidationError as error:
        raise CheckpointError(str(error)) from None
    if fields.use_bidirectional_attention:
        raise CheckpointError("use_bidirectional_attention is not supported")
    if fields.is_causal is False:  # models of embeddings, such as gte-Qwen2
        raise CheckpointError("is_causal false is not supported: each token would see later ones")
    return fields


def with_defaults(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of config.json with a family's values for those that it omits. A base of
    the rope that is null counts as omitted, as in transformers; other nulls have a meaning.
    """
    written = dict(given)
    if written.get("rope_theta") is None:
        written.pop("rope_theta", None)
    return {**defaults, **written}


def text_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config of a multimodal model's text part. Raises CheckpointError
    if it is missing.
    """
    text = given.get("text_config")
    if not isinstance(text, dict):
        raise CheckpointError("text_config is missing")
    name = "tie_word_embeddings"
    return {**text, name: given[name]} if name in given else text


def decoder_config(
    fields: ConfigFields,
    *,
    is_sliding: Callable[[int], bool] = lambda layer_index: False,
    may_list_layers: bool = False,
    may_rotate_partly: bool = False,
) -> ModelConfig:
    """Returns a decoder without family-specific features. Raises CheckpointError for
    invalid fields.

    `is_sliding` selects the layers with a window; with `may_list_layers`, `layer_types` overrides.
    """
    head_dim = _head_dim(fields)
    layer_types = _layer_types(fields, is_sliding, may_list_layers)
    ropes = layer_ropes(fields)
    if not may_rotate_partly and any(rope.partial_rotary_factor != 1.0 for rope in ropes):
        raise CheckpointError("partial_rotary_factor is not supported for this architecture")
    return ModelConfig(
        vocab_size=fields.vocab_size,
        hidden_size=fields.hidden_size,
        intermediate_size=fields.intermediate_size,
        num_heads=fields.num_attention_heads,
        num_kv_heads=_num_kv_heads(fields),
        head_dim=head_dim,
        max_position_embeddings=served_context(ropes[0]),
        rms_norm_eps=fields.rms_norm_eps,
        activation=_activation(fields),
        attention_scale=head_dim**-0.5,
        layers=tuple(
            LayerConfig(
                reach=_reach(fields, layer_type),
                rope_index=len(ropes) - 1 if layer_type == SLIDING else 0,
            )
            for layer_type in layer_types
        ),
        ropes=tuple(rope_config(rope) for rope in ropes),
        has_tied_embeddings=fields.tie_word_embeddings,
    )


def layer_ropes(fields: ConfigFields) -> list[RopeFields]:
    """Returns one rope for all layers, or two: for layers without and with a window."""
    head_dim = _head_dim(fields)
    return [_rope_fields(fields, head_dim, written) for written in _written_ropes(fields)]


def _reach(fields: ConfigFields, layer_type: str) -> Reach:
    if layer_type == FULL:
        return None
    assert fields.sliding_window is not None  # see _layer_types
    return Window(fields.sliding_window)


def _num_kv_heads(fields: ConfigFields) -> int:
    num_kv_heads = fields.num_key_value_heads
    if num_kv_heads is None:
        return fields.num_attention_heads
    if fields.num_attention_heads % num_kv_heads:
        raise CheckpointError(
            f"{fields.num_attention_heads} attention heads cannot share {num_kv_heads} KV heads"
        )
    return num_kv_heads


def _head_dim(fields: ConfigFields) -> int:
    head_dim = fields.head_dim
    if head_dim is None:
        if fields.hidden_size % fields.num_attention_heads:
            raise CheckpointError(
                f"hidden_size {fields.hidden_size} is not a multiple of "
                f"{fields.num_attention_heads} attention heads and head_dim is not given"
            )
        head_dim = fields.hidden_size // fields.num_attention_heads
    if head_dim % 2:
        raise CheckpointError(f"head_dim {head_dim} is odd; rotary embedding needs pairs")
    return head_dim


def _activation(fields: ConfigFields) -> str:
    name = "hidden_act" if fields.hidden_activation is None else "hidden_activation"
    activation: str = getattr(fields, name)
    if activation not in ACTIVATIONS:
        known = ", ".join(dict.fromkeys(ACTIVATIONS.values()))
        raise CheckpointError(f"{name} {activation!r} is not supported, only {known}")
    return ACTIVATIONS[activation]


def _layer_types(
    fields: ConfigFields, is_sliding: Callable[[int], bool], may_list: bool
) -> tuple[str, ...]:
    implied = tuple(SLIDING if is_sliding(i) else FULL for i in range(fields.num_hidden_layers))
    layer_types = implied if fields.layer_types is None else fields.layer_types
    if layer_types != implied and not may_list:
        raise CheckpointError("layer_types are not supported for this architecture")
    if len(layer_types) != fields.num_hidden_layers:
        raise CheckpointError(
            f"{len(layer_types)} layer_types for {fields.num_hidden_layers} layers"
        )
    for unknown in set(layer_types) - {FULL, SLIDING}:
        raise CheckpointError(f"layer type {unknown!r} is not supported, only {FULL}, {SLIDING}")
    if SLIDING in layer_types and fields.sliding_window is None:
        raise CheckpointError("there are sliding_attention layers, but no sliding_window")
    return layer_types


def _written_ropes(fields: ConfigFields) -> list[dict[str, Any]]:
    """Returns one dict for all layers, or two: for layers without and with a window."""
    written = fields.rope_scaling if fields.rope_scaling else fields.rope_parameters
    written = {} if written is None else written
    if FULL not in written and SLIDING not in written:
        return [written]
    for unknown in written.keys() - {FULL, SLIDING}:
        raise CheckpointError(f"rope_parameters: layer type {unknown!r} is not supported")
    return [rope_of(written, layer_type) for layer_type in (FULL, SLIDING)]


def rope_of(written: Mapping[str, Any], layer_type: str) -> dict[str, Any]:
    """Returns the rope parameters of one layer type. Raises CheckpointError if they
    are not an object.
    """
    rope = written.get(layer_type) or {}
    if not isinstance(rope, dict):
        raise CheckpointError(f"rope_parameters: {layer_type} is not an object")
    return rope


def _rope_fields(fields: ConfigFields, head_dim: int, written: Mapping[str, Any]) -> RopeFields:
    """Returns the fields of one rope; older configs write some of them outside its dict.

    As in Phi3, the outer `original_max_position_embeddings` has priority.
    """
    original = fields.original_max_position_embeddings
    if original is None:
        original = written.get("original_max_position_embeddings")
    return rope_fields(
        {
            "rope_theta": DEFAULT_THETA if fields.rope_theta is None else fields.rope_theta,
            "partial_rotary_factor": fields.partial_rotary_factor,
            **{name: value for name, value in written.items() if value is not None},
            "original_max_position_embeddings": original,
            "max_position_embeddings": fields.max_position_embeddings,
            "head_dim": head_dim,
        }
    )

"""How each family reads the configs of published checkpoints, and which configs it rejects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from shared.engine.model_config.model_config import ModelConfig
from shared.engine.models.checkpoint_config import read_config
from shared.errors import CheckpointError

SIZES = {
    "vocab_size": 199,
    "hidden_size": 96,
    "intermediate_size": 80,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
HUGE_YARN = {"type": "yarn", "factor": 1e308, "original_max_position_embeddings": 4096}
SHORT, LONG = [1.0 + pair for pair in range(9)], [2.0 + 3 * pair for pair in range(9)]
# As transformers 4 and the families' authors write them: many fields are left to the defaults.
PUBLISHED: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"rope_theta": 500_000.0, "max_position_embeddings": 8192},
    "LlamaForCausalLM, linear": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "LlamaForCausalLM, llama3": {
        "rope_theta": 500_000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
    },
    "MistralForCausalLM": {},
    "MistralForCausalLM, no window": {"sliding_window": None, "head_dim": 32},
    "Qwen2ForCausalLM": {"sliding_window": 131_072, "use_sliding_window": False},
    "Qwen2ForCausalLM, window": {
        "sliding_window": 512,
        "use_sliding_window": True,
        "max_window_layers": 5,
    },
    "Qwen2ForCausalLM, yarn": {
        "max_position_embeddings": 32_768,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32_768,
        },
    },
    "Qwen3ForCausalLM": {"rope_theta": 1_000_000, "sliding_window": None},
    "Gemma2ForCausalLM": {},
    "Gemma3ForCausalLM": {"rope_theta": 500_000.0, "rope_local_base_freq": 5_000.0},
    "Gemma3ForCausalLM, scaled": {
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window": 1024,
        "sliding_window_pattern": 3,
    },
    "Phi3ForCausalLM": {"sliding_window": 2047},
    "Phi3ForCausalLM, longer": {
        "max_position_embeddings": 131_072,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75,
        "rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG},
    },
    "Phi3ForCausalLM, never longer": {
        "partial_rotary_factor": 0.75,
        "rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG},
    },
    "Llama4ForCausalLM": {"interleave_moe_layer_step": 1, "num_local_experts": 3},
    "Llama4ForConditionalGeneration": {
        "text_config": {
            **SIZES,
            "eos_token_id": [1, 107],
            "max_position_embeddings": 10_485_760,
            "no_rope_layers": [],
            "rope_scaling": {
                "factor": 16.0,
                "high_freq_factor": 1.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500_000.0,
            "head_dim": 24,
        },
        "vision_config": {
            "model_type": "llama4_vision_model",
            "hidden_size": 1408,
            "num_hidden_layers": 1,
            "image_size": 336,
            "vision_output_dim": 4096,
        },
        "image_token_index": 6,
    },
    "MixtralForCausalLM": {"rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2},
    "Qwen3MoeForCausalLM": {
        "head_dim": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "sliding_window": None,
        "rope_theta": 1_000_000.0,
    },
    "Glm4MoeForCausalLM": {
        "head_dim": 32,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": True,
        "attention_bias": True,
        "num_nextn_predict_layers": 1,
    },
    "DeepseekV3ForCausalLM": {
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "num_nextn_predict_layers": 1,
        "rope_scaling": {
            "type": "yarn",
            "factor": 2.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 1024,
        },
    },
    "Gemma3ForConditionalGeneration": {
        "eos_token_id": [1, 106],
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10_240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {"model_type": "siglip_vision_model", "num_hidden_layers": 1},
    },
}


def _read(folder: Path, written: dict[str, Any]) -> ModelConfig:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(written))
    return read_config(folder)


def _written(kind: str) -> dict[str, Any]:
    return {"architectures": [kind.partition(",")[0]], **SIZES, **PUBLISHED[kind]}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_config_equals_its_rewrite_by_transformers(tmp_path: Path, kind: str) -> None:
    """transformers reads the config, fills in defaults, and writes the newer field names."""
    written = _written(kind)
    config_class = getattr(transformers, written["architectures"][0]).config_class
    config_class.from_dict(json.loads(json.dumps(written))).save_pretrained(tmp_path / "newer")
    newer = json.loads((tmp_path / "newer" / "config.json").read_text())
    assert "rope_scaling" not in newer
    newer["eos_token_id"] = written.get("eos_token_id")
    assert _read(tmp_path / "older", written) == _read(tmp_path / "newer", newer)


@pytest.mark.parametrize("kind", PUBLISHED)
def test_a_base_of_null_is_that_of_the_family(tmp_path: Path, kind: str) -> None:
    written = _written(kind)
    given = {name: value for name, value in written.items() if name != "rope_theta"}
    assert _read(tmp_path, {**given, "rope_theta": None}) == _read(tmp_path, given)


def test_windows_apply_to_the_right_layers(tmp_path: Path) -> None:
    def windows(kind: str, **changes: Any) -> list[int | None]:
        config = _read(tmp_path, {**_written(kind), **changes})
        return [layer.reach and layer.reach.tokens for layer in config.layers]

    assert windows("MistralForCausalLM", sliding_window=7) == [7] * 8
    assert windows("MistralForCausalLM, no window") == [None] * 8
    assert windows("Qwen2ForCausalLM") == [None] * 8
    assert windows("Qwen2ForCausalLM, window") == [None] * 5 + [512] * 3
    assert windows("Gemma2ForCausalLM") == [4096, None] * 4
    assert windows("Gemma3ForCausalLM, scaled") == [1024, 1024, None] * 2 + [1024] * 2
    assert windows("Phi3ForCausalLM") == [2047] * 8


def test_gemma3_has_a_rope_for_each_kind_of_layer(tmp_path: Path) -> None:
    config = _read(tmp_path, _written("Gemma3ForCausalLM"))
    assert [rope.theta for rope in config.ropes] == [500_000.0, 5_000.0]
    assert [layer.rope_index for layer in config.layers] == [1, 1, 1, 1, 1, 0, 1, 1]
    assert all((layer.reach is None) == (layer.rope_index == 0) for layer in config.layers)


@pytest.mark.parametrize("older", ["su", "yarn"])
def test_phi3_accepts_older_names_of_longrope(tmp_path: Path, older: str) -> None:
    written = _written("Phi3ForCausalLM, longer")
    expected = _read(tmp_path, written)
    rope = {**written["rope_scaling"], "type": older}
    assert _read(tmp_path, {**written, "rope_scaling": rope}) == expected


def test_older_llama4_config_has_numbers_for_flags_and_tokens_of_its_text(tmp_path: Path) -> None:
    written = _written("Llama4ForConditionalGeneration")
    text = {**written["text_config"], "attn_temperature_tuning": 4}
    config = _read(tmp_path, {**written, "text_config": text})
    assert config == _read(tmp_path, written)
    assert config.eos_token_ids == (1, 107)
    assert [layer.rope_index for layer in config.layers] == [0, 0, 0, None] * 2
    none = _read(tmp_path, {**written, "text_config": {**text, "attn_temperature_tuning": 0}})
    assert none.layers[3].query_temperature is None


REJECTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "moe": ("LlamaForCausalLM", {"architectures": ["Qwen2MoeForCausalLM"]}, "'Qwen2MoeForCausalL"),
    "mla": ("LlamaForCausalLM", {"architectures": ["DeepseekV2ForCausalLM"]}, "'DeepseekV2ForCaus"),
    "none": (
        "LlamaForCausalLM",
        {"architectures": None},
        "names no architecture of a language model",
    ),
    "quantized": (
        "Gemma3ForConditionalGeneration",
        {"quantization_config": {"bits": 4}},
        "quantization_config",
    ),
    "activation": (
        "Gemma2ForCausalLM",
        {"hidden_activation": "relu"},
        "hidden_activation 'relu' is not supported, only silu, gelu_pytorch_tanh",
    ),
    "bidirectional": (
        "Gemma3ForCausalLM",
        {"use_bidirectional_attention": True},
        "use_bidirectional_attention is not supported",
    ),
    "not causal": (
        "Qwen2ForCausalLM",
        {"is_causal": False},
        "is_causal false is not supported",
    ),
    "rope type": (
        "Qwen2ForCausalLM",
        {"rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}},
        "rope type 'mrope' is not supported",
    ),
    "rope field": (
        "Qwen2ForCausalLM",
        {"rope_scaling": {"type": "linear", "factor": "two"}},
        r"rope parameters: Expected `float \| null`, got `str` - at `\$.factor`",
    ),
    "no factor": (
        "LlamaForCausalLM",
        {"rope_scaling": {"type": "dynamic"}},
        "rope type 'dynamic' needs a factor above 0",
    ),
    "yarn without a context": (
        "LlamaForCausalLM",
        {"rope_scaling": {"type": "yarn"}},
        "rope type 'yarn' needs a factor above 0",
    ),
    "long factors": (
        "Phi3ForCausalLM",
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
        "needs 12 positive numbers",
    ),
    "partly rotated": (
        "LlamaForCausalLM",
        {"partial_rotary_factor": 0.5},
        "partial_rotary_factor is not supported for this architecture",
    ),
    "no pairs": (
        "Phi3ForCausalLM",
        {"partial_rotary_factor": 0.3},
        "partial_rotary_factor 0.3 of head_dim 24 leaves no pairs",
    ),
    "chunked": (
        "Qwen3ForCausalLM",
        {"layer_types": ["chunked_attention"] * 8},
        "layer type 'chunked_attention' is not supported",
    ),
    "too few layers": (
        "Gemma2ForCausalLM",
        {"layer_types": ["full_attention"]},
        "1 layer_types for 8 layers",
    ),
    "layers of one kind": (
        "MistralForCausalLM",
        {"layer_types": ["full_attention", "sliding_attention"] * 4},
        "layer_types are not supported for this architecture",
    ),
    "no window": (
        "Qwen2ForCausalLM",
        {"layer_types": ["sliding_attention"] * 8, "use_sliding_window": False},
        "sliding_attention layers, but no sliding_window",
    ),
    "zero window": (
        "MistralForCausalLM",
        {"sliding_window": 0},
        r"at `\$.sliding_window`",
    ),
    "rope of an unknown layer type": (
        "Gemma3ForCausalLM",
        {"rope_parameters": {"rope_type": "default"}},
        "rope_parameters: 'rope_type' is not a layer type",
    ),
    "zero cap": (
        "Gemma2ForCausalLM",
        {"attn_logit_softcapping": 0.0},
        r"at `\$.attn_logit_softcapping`",
    ),
    "zero beta": (
        "LlamaForCausalLM",
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_slow": 0}},
        "rope parameters are out of range",
    ),
    "rope factors": (
        "LlamaForCausalLM, llama3",
        {"rope_scaling": {"type": "llama3", "factor": 2.0, "low_freq_factor": 5.0}},
        "low_freq_factor 5.0 and high_freq_factor 4.0",
    ),
    "contradicting layers": (
        "Llama4ForCausalLM",
        {"layer_types": ["full_attention"] * 8},
        r"layer_types\[0\] is 'full_attention', but a layer with rope \(no_rope_layers\) is 'chun",
    ),
    "too few ropes": (
        "Llama4ForCausalLM",
        {"no_rope_layers": [1, 0]},
        "2 no_rope_layers for 8 layers",
    ),
    "no chunk size": (
        "Llama4ForCausalLM",
        {"attention_chunk_size": None},
        "attention_chunk_size is missing, but layers with rope have chunked attention",
    ),
    "no flag": ("Llama4ForCausalLM", {"no_rope_layers": [2] * 8}, r"`\$.no_rope_layers\[0\]`"),
    "no image text": (
        "Llama4ForConditionalGeneration",
        {"text_config": None},
        "text_config is missing",
    ),
    "no text": (
        "Gemma3ForConditionalGeneration",
        {"text_config": None},
        "text_config is missing",
    ),
}


@pytest.mark.parametrize("kind", REJECTED)
def test_unsupported_config_is_rejected_in_one_line(tmp_path: Path, kind: str) -> None:
    family, changes, message = REJECTED[kind]
    with pytest.raises(CheckpointError, match=message) as caught:
        _read(tmp_path, {**_written(family), **changes})
    assert caught.value.message.startswith(f"{tmp_path}/config.json: ")
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"vocab_size": 2**40}, "vocab_size"),
        ({"hidden_size": 2**40}, "hidden_size"),
        ({"rope_scaling": HUGE_YARN}, "numbers out of range"),
        ({"rope_parameters": {"full_attention": 5}}, "full_attention is not an object"),
    ],
)
def test_value_out_of_range_is_rejected_in_one_line(
    tmp_path: Path, changed: dict[str, Any], reason: str
) -> None:
    """Without the check, the first case would fill all memory with its layers."""
    config = {"architectures": ["LlamaForCausalLM"], **SIZES, **changed}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=reason) as rejected:
        read_config(tmp_path)
    assert "\n" not in rejected.value.message

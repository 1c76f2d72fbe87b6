"""Small random models of every family, with the options that its checkpoints can have."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from shared.engine.models.checkpoint_config import read_config
from shared.engine.planning.vision_tensors import vision_tensors
from tests.support.engine.checkpoints import LLAMA3_ROPE, write_model
from tests.support.engine.vision.vision_models import write_smolvlm

# 3 query heads share one KV head; windows end within a block and within a tile
SHAPE = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
GEMMA2 = {
    "sliding_window": 21,
    "query_pre_attn_scalar": 40,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 5.0,
}
GEMMA3 = {"sliding_window": 21, "query_pre_attn_scalar": 40, "sliding_window_pattern": 2}
THETA = {"rope_theta": 10_000.0}
YARN = {
    **THETA,
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
LONGROPE = {
    **THETA,
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
    "long_factor": [1.5, 2.0, 3.0, 5.0, 9.0, 17.0],
    "partial_rotary_factor": 0.75,
}


# Ranks, dims and eps differ from each other and from their defaults; the first layer is dense.
DEEPSEEK = {
    "head_dim": 8,
    "num_key_value_heads": 3,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "kv_lora_rank": 20,
    "q_lora_rank": 14,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "rms_norm_eps": 1e-2,
    "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
}

# chunks and steps of the temperature that a prompt crosses several times; both rope factors equal
LLAMA4 = {
    "intermediate_size": 64,
    "intermediate_size_mlp": 80,
    "num_hidden_layers": 4,
    "moe_layers": [],
    "no_rope_layer_interval": 2,
    "attention_chunk_size": 16,
    "floor_scale": 4,
    "attn_scale": 0.4,
    "rope_parameters": {
        **LLAMA3_ROPE,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 128,
    },
}
LLAMA4_EXPERTS = {"moe_layers": None, "num_local_experts": 9, "intermediate_size": 40}
GLM4_MOE = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
}
# rows of gate and up alternate; the clamp limits many, and sinks take much of the weights
GPT_OSS = {
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_local_experts": 7,
    "num_experts_per_tok": 3,
    "sliding_window": 21,
    "swiglu_limit": 0.5,
    "rope_parameters": {**YARN, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
}


def one_tensor_each(tensors: dict[str, Tensor]) -> None:
    """Replaces the stacked experts of Llama 4 by linear layers, as tools do before they quantize
    them.
    """
    for name in [*tensors]:
        if ".experts." not in name or tensors[name].ndim != 3:
            continue
        stem, _, kind = name.rpartition(".")
        for index, expert in enumerate(tensors.pop(name).transpose(1, 2)):
            parts = {"down_proj": expert}
            if kind == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True))
            for part, weight in parts.items():
                tensors[f"{stem}.{index}.{part}.weight"] = weight.contiguous()


def stack_experts(tensors: dict[str, Tensor]) -> None:
    """Undoes `one_tensor_each`."""
    found: dict[str, dict[str, Tensor]] = {}
    for name in [*tensors]:
        layer, dot, expert = name.rpartition(".experts.")
        if dot:
            found.setdefault(f"{layer}.experts", {})[expert] = tensors.pop(name)
    for place, experts in found.items():
        indices = range(len(experts) // 3)
        gate, up, down = (
            torch.stack([experts[f"{index}.{part}_proj.weight"].T for index in indices])
            for part in ("gate", "up", "down")
        )
        tensors[f"{place}.gate_up_proj"] = torch.cat((gate, up), dim=2)
        tensors[f"{place}.down_proj"] = down


@dataclass(frozen=True)
class Family:
    architecture: str
    fields: dict[str, Any]

    def write(self, folder: Path, **options: Any) -> PreTrainedModel:
        return write_model(folder, self.architecture, **{**SHAPE, **self.fields, **options})


class MultimodalLlama4(Family):
    """Compared by its text model: transformers 5.24.0 fails where the whole one has no image."""

    def write(self, folder: Path, **options: Any) -> PreTrainedModel:
        vision = {
            "hidden_size": 16,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
            "vision_output_dim": 16,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
        }
        text = {"vocab_size": 199, "initializer_range": 0.25, "pad_token_id": 0, "eos_token_id": 2}
        written = write_model(
            folder,
            self.architecture,
            text_config={**text, **SHAPE, **self.fields},
            vision_config=vision,
            image_token_index=0,
            boi_token_index=1,
            eoi_token_index=3,
            **options,
        )
        text_model: PreTrainedModel = written.language_model
        return text_model


class WithImages(Family):
    """A SigLIP encoder beside a Llama; compared here without images."""

    def write(self, folder: Path, **options: Any) -> PreTrainedModel:
        return write_smolvlm(folder, self.architecture, text={**SHAPE, **self.fields}, **options)


class MultimodalGemma3(Family):
    def write(self, folder: Path, **options: Any) -> PreTrainedModel:
        vision = {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        }
        return write_model(
            folder,
            self.architecture,
            text_config={"vocab_size": 199, "initializer_range": 0.25, **SHAPE, **self.fields},
            vision_config=vision,
            mm_tokens_per_image=4,
            image_token_index=0,
            boi_token_index=1,
            eoi_token_index=2,
            **options,
        )


class KimiText(Family):
    """The names of Kimi K2.5 on the Hub, beside an image encoder and a layer that predicts a second
    token. (transformers' own writer of this architecture gives other names.)
    """

    def write(self, folder: Path, **options: Any) -> PreTrainedModel:
        model = write_model(folder, "DeepseekV3ForCausalLM", **{**SHAPE, **self.fields, **options})
        path = folder / "model.safetensors"
        tensors = load_file(path)
        renamed = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
        number = SHAPE["num_hidden_layers"]
        renamed[f"language_model.model.layers.{number}.eh_proj.weight"] = torch.ones(2)
        config = folder / "config.json"
        text = {**json.loads(config.read_text()), "model_type": "kimi_k2"}
        text["architectures"] = ["DeepseekV3ForCausalLM"]
        whole = {
            "architectures": [self.architecture],
            "model_type": "kimi_k25",
            "eos_token_id": 2,
            "media_placeholder_token_id": 0,
            "vision_config": {
                "vt_hidden_size": 16,
                "vt_intermediate_size": 24,
                "vt_num_hidden_layers": 1,
                "vt_num_attention_heads": 2,
            },
            "text_config": text,
        }
        config.write_text(json.dumps(whole))
        vision = read_config(folder).vision
        assert vision is not None
        for name, shape in vision_tensors(vision).items():
            renamed[name] = torch.ones(shape)
        save_file(renamed, path, {"format": "pt"})
        return model


FAMILIES = {
    "llama, yarn": Family("LlamaForCausalLM", {"rope_parameters": YARN}),
    "llama, dynamic": Family(
        "LlamaForCausalLM", {"rope_parameters": {**THETA, "rope_type": "dynamic", "factor": 2.0}}
    ),
    "mistral": Family("MistralForCausalLM", {"sliding_window": 21}),
    "mistral, no window": Family("MistralForCausalLM", {"sliding_window": None}),
    "qwen2": Family("Qwen2ForCausalLM", {}),
    "qwen2, window from layer 1": Family(
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 70, "max_window_layers": 1},
    ),
    "qwen3": Family("Qwen3ForCausalLM", {}),
    "qwen3, biases, listed layers": Family(
        "Qwen3ForCausalLM",
        {
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 21,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma2": Family("Gemma2ForCausalLM", GEMMA2),
    "gemma2, no caps, biases, tied": Family(
        "Gemma2ForCausalLM",
        {
            "sliding_window": 64,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": Family("Gemma3ForCausalLM", GEMMA3),
    "gemma3, scaled, capped": Family(
        "Gemma3ForCausalLM",
        {
            **GEMMA3,
            "final_logit_softcapping": 5.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
    ),
    "gemma3, text of a multimodal one": MultimodalGemma3("Gemma3ForConditionalGeneration", GEMMA3),
    "llama4": Family("Llama4ForCausalLM", LLAMA4),
    "llama4, experts": Family("Llama4ForCausalLM", {**LLAMA4, **LLAMA4_EXPERTS}),
    "llama4, experts in each second layer": Family(
        "Llama4ForCausalLM",
        {**LLAMA4, **LLAMA4_EXPERTS, "interleave_moe_layer_step": 2, "use_qk_norm": False},
    ),
    "llama4, listed layers, no norms": Family(
        "Llama4ForCausalLM",
        {**LLAMA4, "use_qk_norm": False, "no_rope_layers": [0, 1, 1, 0], "attention_bias": True},
    ),
    "llama4, no temperature": Family(
        "Llama4ForCausalLM",
        {
            **LLAMA4,
            "num_hidden_layers": 5,
            "no_rope_layers": [],
            "no_rope_layer_interval": 4,
            "attn_temperature_tuning": False,
        },
    ),
    "llama4, text of a multimodal one": MultimodalLlama4(
        "Llama4ForConditionalGeneration", {**LLAMA4, **LLAMA4_EXPERTS, "moe_layers": [3]}
    ),
    "phi3": Family("Phi3ForCausalLM", {}),
    "phi3, window, partly rotated": Family(
        "Phi3ForCausalLM",
        {"sliding_window": 21, "rope_parameters": {**THETA, "partial_rotary_factor": 0.5}},
    ),
    "phi3, longrope": Family(
        "Phi3ForCausalLM",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32},
    ),
    "deepseek": Family("DeepseekV3ForCausalLM", DEEPSEEK),
    "deepseek, full queries, biases, halves": Family(
        "DeepseekV3ForCausalLM",
        {**DEEPSEEK, "q_lora_rank": None, "attention_bias": True, "rope_interleave": False},
    ),
    "kimi, text": KimiText("KimiK25ForConditionalGeneration", {**DEEPSEEK, "q_lora_rank": None}),
    "smolvlm": WithImages("SmolVLMForConditionalGeneration", {}),
    "idefics3": WithImages("Idefics3ForConditionalGeneration", {}),
    "mixtral": Family(
        "MixtralForCausalLM",
        {"num_local_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 24},
    ),
    "qwen3 moe": Family(
        "Qwen3MoeForCausalLM",
        {
            "num_experts": 17,
            "num_experts_per_tok": 5,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3 moe, plain weights, each second layer, window": Family(
        "Qwen3MoeForCausalLM",
        {
            "num_experts": 8,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 40,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "sliding_window": 21,
        },
    ),
    "glm4 moe": Family("Glm4MoeForCausalLM", GLM4_MOE),
    "glm4 moe, norms, biases, plain weights": Family(
        "Glm4MoeForCausalLM",
        {
            **GLM4_MOE,
            "n_routed_experts": 17,
            "num_experts_per_tok": 5,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 0.5,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    "gpt-oss": Family("GptOssForCausalLM", GPT_OSS),
    "gpt-oss, listed layers, no biases, truncated": Family(
        "GptOssForCausalLM",
        {
            **GPT_OSS,
            "attention_bias": False,
            "num_experts_per_tok": 2,
            "swiglu_limit": 7.0,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "rope_parameters": {**YARN, "truncate": True},
        },
    ),
}

"""Checkpoints of full size whose files have true headers, and holes in place of the tensors."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

from shared.engine.models.vision import kimi, llama4
from shared.engine.planning.vision_tensors import vision_tensors

Tensors = Iterator[tuple[str, str, tuple[int, ...]]]  # name, dtype, shape
ITEM_BYTES = {"BF16": 2, "F32": 4, "I32": 4}


def write_sparse(folder: Path, config: Mapping[str, Any], tensors: Tensors, files: int) -> None:
    """Consecutive tensors in so many files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    listed = list(tensors)
    weight_map = {}
    for index in range(files):
        name = f"model-{index + 1:05}-of-{files:05}.safetensors"
        part = listed[len(listed) * index // files : len(listed) * (index + 1) // files]
        write_file(folder / name, part)
        weight_map |= {tensor: name for tensor, _, _ in part}
    index_file = folder / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"weight_map": weight_map}))


def write_file(path: Path, tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in tensors:
        first, end = end, end + ITEM_BYTES[dtype] * prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [first, end]}
    encoded = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.truncate(file.tell() + end)


def bf16(shapes: Mapping[str, tuple[int, ...]], prefix: str = "") -> Tensors:
    for name, shape in shapes.items():
        yield f"{prefix}{name}", "BF16", shape


SCOUT: dict[str, Any] = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "model_type": "llama4",
    "text_config": {
        "vocab_size": 202_048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16_384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 10_485_760,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "no_rope_layers": [],
        "attention_chunk_size": 8192,
        "use_qk_norm": True,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "factor": 16.0,
            "high_freq_factor": 1.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    "vision_config": {
        "hidden_size": 1408,
        "intermediate_size": 5632,
        "num_hidden_layers": 34,
        "image_size": 336,
        "vision_output_dim": 4096,
    },
}


def scout_tensors() -> Tensors:
    layer = {
        "input_layernorm.weight": (5120,),
        "post_attention_layernorm.weight": (5120,),
        "self_attn.q_proj.weight": (5120, 5120),
        "self_attn.k_proj.weight": (1024, 5120),
        "self_attn.v_proj.weight": (1024, 5120),
        "self_attn.o_proj.weight": (5120, 5120),
        "feed_forward.router.weight": (16, 5120),
        "feed_forward.experts.gate_up_proj": (16, 5120, 16_384),
        "feed_forward.experts.down_proj": (16, 8192, 5120),
        "feed_forward.shared_expert.gate_proj.weight": (8192, 5120),
        "feed_forward.shared_expert.up_proj.weight": (8192, 5120),
        "feed_forward.shared_expert.down_proj.weight": (5120, 8192),
    }
    ends = {
        "model.embed_tokens.weight": (202_048, 5120),
        "model.norm.weight": (5120,),
        "lm_head.weight": (202_048, 5120),
    }
    yield from bf16(ends, "language_model.")
    for index in range(48):
        yield from bf16(layer, f"language_model.model.layers.{index}.")
    yield from _encoder(llama4, SCOUT)


KIMI: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "text_config": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "dtype": "bfloat16",
        "vocab_size": 163_840,
        "hidden_size": 7168,
        "intermediate_size": 18_432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.827,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50_000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 64.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "input_activations": None,
                    "output_activations": None,
                    "weights": {
                        "num_bits": 4,
                        "group_size": 32,
                        "strategy": "group",
                        "symmetric": True,
                        "type": "int",
                        "dynamic": False,
                        "actorder": None,
                    },
                }
            },
            "ignore": [
                "lm_head",
                "re:.*self_attn.*",
                "re:.*shared_experts.*",
                "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
            ],
        },
    },
    "vision_config": {"vt_num_hidden_layers": 27},
}


def kimi_tensors() -> Tensors:
    attention = {
        "input_layernorm.weight": (7168,),
        "post_attention_layernorm.weight": (7168,),
        "self_attn.q_a_proj.weight": (1536, 7168),
        "self_attn.q_a_layernorm.weight": (1536,),
        "self_attn.q_b_proj.weight": (64 * 192, 1536),
        "self_attn.kv_a_proj_with_mqa.weight": (576, 7168),
        "self_attn.kv_a_layernorm.weight": (512,),
        "self_attn.kv_b_proj.weight": (64 * 256, 512),
        "self_attn.o_proj.weight": (7168, 64 * 128),
    }
    ends = {
        "model.embed_tokens.weight": (163_840, 7168),
        "model.norm.weight": (7168,),
        "lm_head.weight": (163_840, 7168),
    }
    yield from bf16(ends, "language_model.")
    for index in range(61):
        layer = f"language_model.model.layers.{index}."
        yield from bf16(attention, layer)
        if index == 0:
            yield from bf16(_mlp(18_432), f"{layer}mlp.")
            continue
        yield from bf16({"mlp.gate.weight": (384, 7168)}, layer)
        yield f"{layer}mlp.gate.e_score_correction_bias", "F32", (384,)
        yield from bf16(_mlp(2048), f"{layer}mlp.shared_experts.")
        for expert in range(384):
            for name, shape in _mlp(2048).items():
                yield from _int4(f"{layer}mlp.experts.{expert}.{name}", *shape)
    yield from _encoder(kimi, KIMI)


def _encoder(family: ModuleType, config: dict[str, Any]) -> Tensors:
    vision = family.configure(config).vision
    assert vision is not None
    yield from bf16(vision_tensors(vision))


def _mlp(inner: int) -> dict[str, tuple[int, int]]:
    return {
        "gate_proj.weight": (inner, 7168),
        "up_proj.weight": (inner, 7168),
        "down_proj.weight": (7168, inner),
    }


def _int4(name: str, rows: int, columns: int) -> Tensors:
    yield f"{name}_packed", "I32", (rows, columns // 8)
    yield f"{name}_scale", "BF16", (rows, columns // 32)
    yield f"{name}_shape", "I32", (2,)

"""A model of each family at real sizes, of as few layers as have every kind, weights unset."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from shared.config import default_block_size
from shared.engine.executors.loading.kv_scales import set_kv_scales
from shared.engine.executors.loading.model_loading import finish_model, kv_layout_of
from shared.engine.executors.step_computer import StepComputer
from shared.engine.kv.kv_cache import allocate_kv_cache
from shared.engine.layers.linear import MatmulModule
from shared.engine.models.checkpoint_config import read_config
from shared.engine.models.decoder import Decoder
from shared.kv_layout import FP8
from shared.numerics import Activations
from tests.support.engine.families import FAMILIES
from tests.support.kernels.split_weights import empty_split

FP8_WEIGHTS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How a worker differs from one with the default options."""

    dtype: torch.dtype = torch.bfloat16
    kv_dtype: str | None = None
    activations: Activations = "plain"
    is_split: bool = False  # its weights, in 12 bits
    fields: dict[str, Any] = field(default_factory=dict)  # of config.json


def _sizes(hidden: int, inner: int, heads: tuple[int, int, int], **more: Any) -> dict[str, Any]:
    """`heads`: of queries, of keys, and their width."""
    num_heads, num_kv_heads, head_dim = heads
    names = "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"
    sizes = dict(zip(names, (hidden, inner, num_heads, num_kv_heads), strict=True))
    return {**sizes, "head_dim": head_dim, "num_hidden_layers": 1, **more}


def _latents(num_heads: int, num_experts: int, num_groups: int, top_groups: int) -> dict[str, Any]:
    sizes = _sizes(7168, 18_432, (num_heads, num_heads, 64), num_hidden_layers=2)
    names = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank")
    return {
        **sizes,
        **dict(zip(names, (128, 64, 128, 512, 1536), strict=True)),
        "n_routed_experts": num_experts,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "n_group": num_groups,
        "topk_group": top_groups,
    }


# Name -> the family's entry in FAMILIES, and the sizes of a model.
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepSeek V3": ("deepseek", _latents(128, 256, 8, 4)),
    "Kimi K2": ("deepseek", _latents(64, 384, 1, 1)),
    "Llama 3.1 8B": ("llama, yarn", _sizes(4096, 14_336, (32, 8, 128))),
    "Mistral 7B": ("mistral", _sizes(4096, 14_336, (32, 8, 128))),
    "Qwen2.5 7B": ("qwen2", _sizes(3584, 18_944, (28, 4, 128))),
    "Qwen3 8B": ("qwen3", _sizes(4096, 12_288, (32, 8, 128))),
    "Gemma 2 9B": ("gemma2", _sizes(3584, 14_336, (16, 8, 256), num_hidden_layers=2)),
    "Gemma 3 12B": ("gemma3", _sizes(3840, 15_360, (16, 8, 256), num_hidden_layers=2)),
    "Phi-3 mini": ("phi3", _sizes(3072, 8192, (32, 32, 96))),
    "Mixtral 8x7B": (
        "mixtral",
        _sizes(4096, 14_336, (32, 8, 128), num_local_experts=8, num_experts_per_tok=2),
    ),
    "Qwen3 30B-A3B": (
        "qwen3 moe",
        _sizes(
            2048,
            6144,
            (32, 4, 128),
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
        ),
    ),
    "GLM-4.5 Air": (
        "glm4 moe",
        _sizes(
            4096,
            10_944,
            (96, 8, 128),
            num_hidden_layers=2,
            n_routed_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=1408,
            n_group=1,
            topk_group=1,
        ),
    ),
    "Llama 4 Scout": (
        "llama4, experts",
        _sizes(
            5120,
            8192,
            (40, 8, 128),
            num_hidden_layers=2,
            intermediate_size_mlp=16_384,
            num_local_experts=16,
        ),
    ),
    "gpt-oss 20B": (
        "gpt-oss",
        _sizes(
            2880,
            2880,
            (64, 8, 64),
            num_hidden_layers=2,
            num_local_experts=32,
            num_experts_per_tok=4,
            sliding_window=128,
            swiglu_limit=7.0,
        ),
    ),
}


def _heads(num: int) -> dict[str, Any]:
    """Of one rank of several."""
    return {"num_attention_heads": num, "num_key_value_heads": num}


# Name -> the model of SIZES that differs in this, and what differs.
VARIANTS: dict[str, tuple[str, Variant]] = {
    "DeepSeek V3, 16 heads": ("DeepSeek V3", Variant(fields=_heads(16))),
    "DeepSeek V3, 8 heads": ("DeepSeek V3", Variant(fields=_heads(8))),
    "DeepSeek V3, FP8 KV": ("DeepSeek V3", Variant(kv_dtype=FP8)),
    "Llama 3.1 8B, split weights": ("Llama 3.1 8B", Variant(is_split=True)),
    "Llama 3.1 8B, FP8 KV": ("Llama 3.1 8B", Variant(kv_dtype=FP8)),
    "Llama 3.1 8B, BF16 exchange": ("Llama 3.1 8B", Variant(activations="bf16-exchange")),
    "Gemma 2 9B, FP8 KV": ("Gemma 2 9B", Variant(kv_dtype=FP8)),
    "Qwen3 30B-A3B, FP8 weights": (
        "Qwen3 30B-A3B",
        Variant(fields={"num_experts": 8, "quantization_config": FP8_WEIGHTS}),
    ),
}
CASES = (*SIZES, *VARIANTS)


def computer_of(folder: Path, case: str) -> StepComputer:
    name, variant = VARIANTS.get(case, (case, Variant()))
    family, sizes = SIZES[name]
    found = FAMILIES[family]
    fields = {"vocab_size": 128_256, "pad_token_id": 0, "eos_token_id": 2, **found.fields, **sizes}
    fields |= {"max_position_embeddings": 4096, **variant.fields}
    config_class = getattr(transformers, found.architecture).config_class
    config_class(architectures=[found.architecture], **fields).save_pretrained(folder)
    config = read_config(folder)
    kv_dtype = str(variant.dtype).removeprefix("torch.") if variant.kv_dtype is None else FP8
    kv_layout = kv_layout_of(config, kv_dtype, default_block_size("cuda"))
    model = Decoder(config, dtype=variant.dtype, num_positions=4096).eval()
    if variant.kv_dtype is not None:
        set_kv_scales(model, torch.ones(config.num_layers, 2, config.num_kv_heads))
    if variant.is_split:
        _split(model)
    finish_model(model, "exact", is_compressed=variant.is_split, activations=variant.activations)
    cache = allocate_kv_cache(kv_layout, 2, torch.device("cpu"))
    return StepComputer(model, cache, kv_layout)


def _split(model: Decoder) -> None:
    for module in model.modules():
        if isinstance(module, MatmulModule):
            module.replace_weight(empty_split(*module.parameter.shape))

"""The model families, by the name in a checkpoint's `architectures`.

A family's file converts `config.json` to a `ModelConfig`; `decoder` computes. The family files and
this package do not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shared.engine.model_config import ModelConfig
from shared.engine.models import (
    deepseek,
    gemma2,
    gemma3,
    llama,
    llama4,
    mistral,
    phi3,
    qwen2,
    qwen3,
)
from shared.engine.models.moe import glm4_moe, mixtral, qwen3_moe
from shared.errors import CheckpointError

Configure = Callable[[Mapping[str, Any]], ModelConfig]
FAMILIES: dict[str, Configure] = {
    "LlamaForCausalLM": llama.configure,
    "Llama4ForCausalLM": llama4.configure,
    "Llama4ForConditionalGeneration": llama4.configure_text_part,
    "MistralForCausalLM": mistral.configure,
    "Qwen2ForCausalLM": qwen2.configure,
    "Qwen3ForCausalLM": qwen3.configure,
    "Gemma2ForCausalLM": gemma2.configure,
    "Gemma3ForCausalLM": gemma3.configure,
    "Gemma3ForConditionalGeneration": gemma3.configure_text_part,
    "Phi3ForCausalLM": phi3.configure,
    "DeepseekV3ForCausalLM": deepseek.configure,
    "KimiK25ForConditionalGeneration": deepseek.configure_text_part,
    "Kimi_K25ForConditionalGeneration": deepseek.configure_text_part,
    "MixtralForCausalLM": mixtral.configure,
    "Qwen3MoeForCausalLM": qwen3_moe.configure,
    "Glm4MoeForCausalLM": glm4_moe.configure,
}


def family(architecture: str) -> Configure:
    """Raises CheckpointError for an architecture that is not supported."""
    if architecture not in FAMILIES:
        raise CheckpointError(
            f"architecture {architecture!r} is not supported, only {', '.join(FAMILIES)}"
        )
    return FAMILIES[architecture]

"""The model families, by the name in a checkpoint's `architectures`, or by its `model_type`.

A family's file converts `config.json` to a `ModelConfig`; `decoder` computes. The family files and
this package do not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from shared.engine.model_config.model_config import ModelConfig
from shared.engine.models import (
    deepseek,
    gemma2,
    gemma3,
    llama,
    mistral,
    phi3,
    qwen2,
    qwen3,
)
from shared.engine.models.moe import glm4_moe, gpt_oss, llama4, mixtral, qwen3_moe
from shared.engine.models.vision import kimi, smolvlm
from shared.engine.models.vision import llama4 as llama4_with_images
from shared.errors import CheckpointError

Configure = Callable[[Mapping[str, Any]], ModelConfig]
FAMILIES: dict[str, Configure] = {
    "LlamaForCausalLM": llama.configure,
    "Llama4ForCausalLM": llama4.configure,
    "Llama4ForConditionalGeneration": llama4_with_images.configure,
    "MistralForCausalLM": mistral.configure,
    "Qwen2ForCausalLM": qwen2.configure,
    "Qwen3ForCausalLM": qwen3.configure,
    "Gemma2ForCausalLM": gemma2.configure,
    "Gemma3ForCausalLM": gemma3.configure,
    "Gemma3ForConditionalGeneration": gemma3.configure_text_part,
    "Phi3ForCausalLM": phi3.configure,
    "DeepseekV3ForCausalLM": deepseek.configure,
    "KimiK25ForConditionalGeneration": kimi.configure,
    "Kimi_K25ForConditionalGeneration": kimi.configure,
    "SmolVLMForConditionalGeneration": smolvlm.configure,
    "Idefics3ForConditionalGeneration": smolvlm.configure,
    "MixtralForCausalLM": mixtral.configure,
    "Qwen3MoeForCausalLM": qwen3_moe.configure,
    "Glm4MoeForCausalLM": glm4_moe.configure,
    "GptOssForCausalLM": gpt_oss.configure,
}


# Families by `model_type`, which decides in transformers; the architecture names a class of that
# type.
BY_MODEL_TYPE = {
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "llama4": "Llama4ForConditionalGeneration",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "phi3": "Phi3ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "kimi_k25": "KimiK25ForConditionalGeneration",
    "smolvlm": "SmolVLMForConditionalGeneration",
    "idefics3": "Idefics3ForConditionalGeneration",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
# Names of a family's classes: `Qwen3Model`, `LlamaForSequenceClassification`.
_STEM = re.compile(r"(\w+?)(Text)?(Model|PreTrainedModel|For[A-Z]\w*)")


def supported_architecture(architecture: str, model_type: str) -> str:
    """Returns the architecture of `FAMILIES` as which a checkpoint loads. Raises
    CheckpointError.
    """
    if architecture in FAMILIES:
        return architecture
    if model_type in BY_MODEL_TYPE:
        return BY_MODEL_TYPE[model_type]
    stem = _STEM.fullmatch(architecture)
    if stem is not None and not model_type and f"{stem[1]}ForCausalLM" in FAMILIES:
        return f"{stem[1]}ForCausalLM"
    if not architecture and not model_type:
        raise CheckpointError("it names no architecture of a language model")
    named = f"architecture {architecture!r}" if architecture else f"model_type {model_type!r}"
    raise CheckpointError(f"{named} is not served: `hearth models` lists those that are")

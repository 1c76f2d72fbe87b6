"""Small random checkpoints of odd shapes. Their output depends on every input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def write_llama(folder: Path, **options: Any) -> PreTrainedModel:
    return write_model(folder, "LlamaForCausalLM", **options)


def write_model(
    folder: Path,
    architecture: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> PreTrainedModel:
    """Writes a checkpoint with transformers. Returns its model, in FP32 and evaluation mode.

    The model is untied and its weights have a wide distribution: a tied model with the default
    distribution repeats one token. `overrides` are fields of the architecture's config.
    """
    fields: dict[str, Any] = {
        "vocab_size": 199,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 2048,
        "initializer_range": 0.25,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **overrides,
    }
    torch.manual_seed(seed)
    model_class = getattr(transformers, architecture)
    model = model_class(model_class.config_class(**fields)).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # not buffers: rotary frequencies stay FP32
            parameter.data = parameter.data.to(dtype)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.1)
            elif name.endswith("sinks"):
                torch.nn.init.normal_(parameter, std=2.0)
            elif "norm" in name:  # ones or zeros
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                torch.nn.init.normal_(buffer, std=0.5)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model.float()

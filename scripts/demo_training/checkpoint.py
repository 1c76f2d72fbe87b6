"""The checkpoint folder, in the layout of Hugging Face."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from tokenizers import Tokenizer

from demo_training.chat_format import (
    ASSISTANT,
    BOS,
    CHAT_TEMPLATE,
    END,
    PAD,
    RESPONSE_TEMPLATE,
    SYSTEM,
    TOOL_SPECIALS,
    USER,
)
from demo_training.model import Llama, Shape
from demo_training.tokenizer import special_id


def model_config(shape: Shape, tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns the content of config.json."""
    sizes = {k: v for k, v in vars(shape).items() if k != "rope_theta"}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **sizes,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "torch_dtype": "bfloat16",
        **token_ids(tokenizer),
    }


def token_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Returns the ids of the tokens that begin, end and fill a sequence."""
    return {
        "bos_token_id": special_id(tokenizer, BOS),
        "eos_token_id": special_id(tokenizer, END),
        "pad_token_id": special_id(tokenizer, PAD),
    }


def tokenizer_config(shape: Shape) -> dict[str, Any]:
    """Returns the content of tokenizer_config.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": [USER, ASSISTANT, SYSTEM, *TOOL_SPECIALS],
        "model_max_length": shape.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        "response_template": RESPONSE_TEMPLATE,
    }


def load_weights(folder: Path, model: Llama) -> None:
    """Puts the weights of a checkpoint into a model.

    The embeddings of the tokens of tools are drawn anew where the checkpoint is of a model without
    tools, whose last ids were words.
    """
    weights = load((folder / "model.safetensors").read_bytes())
    state = {name.removeprefix("model."): tensor.float() for name, tensor in weights.items()}
    if TOOL_SPECIALS[0] not in (folder / "tokenizer.json").read_text():
        torch.nn.init.normal_(state["embed_tokens.weight"][-len(TOOL_SPECIALS) :], std=0.02)
    model.load_state_dict(state)


def save_checkpoint(out: Path, model: Llama, tokenizer: Tokenizer, shape: Shape) -> None:
    """Writes the checkpoint folder, with all weights rounded to BF16."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {
        f"model.{name}": tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
    }
    (out / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    files = {
        "config.json": model_config(shape, tokenizer),
        "generation_config.json": {"do_sample": False, **token_ids(tokenizer)},
        "tokenizer_config.json": tokenizer_config(shape),
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n")

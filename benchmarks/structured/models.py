"""Checkpoints whose most probable tokens are unusual, with the demo model's tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.checkpoints import write_random_llama, write_tokenizer
from services.cli.cluster.service_options import DEMO_MODEL_DIR

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
WEIGHTS_FILE, CONFIG_FILE = "model.safetensors", "config.json"
SMALL: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 4,
    "pad_token_id": 5,
}


def write_negated_demo_model(model_dir: Path) -> None:
    """The demo model with the opposite of its logits: its most probable allowed token is the one
    that the demo model holds for least probable.
    """
    from safetensors.torch import load_file, save_file

    shutil.copytree(DEMO_MODEL_DIR, model_dir)
    tensors = load_file(model_dir / WEIGHTS_FILE)
    tensors[HEAD] = -tensors.get(HEAD, tensors[EMBEDDING])
    save_file(tensors, model_dir / WEIGHTS_FILE, metadata={"format": "pt"})
    config = msgspec.json.decode((model_dir / CONFIG_FILE).read_bytes())
    config["tie_word_embeddings"] = False
    (model_dir / CONFIG_FILE).write_bytes(msgspec.json.encode(config))


def write_small_random_model(model_dir: Path) -> None:
    """A Llama of two layers with random weights."""
    model_dir.mkdir()
    write_random_llama(model_dir, SMALL, dtype="bfloat16")
    write_tokenizer(model_dir, SMALL["vocab_size"])

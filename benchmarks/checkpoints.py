"""Random checkpoints of a given size, to measure speed without downloaded weights.

python -m benchmarks.checkpoints DIR [--dtype bfloat16]     125 M parameters, ready to serve
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import msgspec

from services.cli.cluster.service_options import DEMO_MODEL_DIR

# 124.7 M parameters: 12 layers of 6.3 M, and 24.6 M each for embedding and head.
LLAMA_125M: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "initializer_range": 0.06,
    "tie_word_embeddings": False,
}


def write_random_llama(model_dir: Path, shape: dict[str, Any], *, dtype: str) -> None:
    """Saves a Llama with normal random weights; the same shape gives the same weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape)).to(getattr(torch, dtype))
    model.save_pretrained(model_dir)


def write_tokenizer(model_dir: Path, vocab_size: int) -> None:
    """Writes the demo model's tokenizer, plus a word for every further id that may be sampled."""
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        if (DEMO_MODEL_DIR / name).exists():
            shutil.copy(DEMO_MODEL_DIR / name, model_dir / name)
    tokenizer = msgspec.json.decode((DEMO_MODEL_DIR / "tokenizer.json").read_bytes())
    vocabulary = tokenizer["model"]["vocab"]
    known = {*vocabulary.values(), *(each["id"] for each in tokenizer["added_tokens"])}
    vocabulary |= {f"Ġword{index}": index for index in range(vocab_size) if index not in known}
    (model_dir / "tokenizer.json").write_bytes(msgspec.json.encode(tokenizer))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    write_random_llama(options.directory, LLAMA_125M, dtype=options.dtype)
    write_tokenizer(options.directory, LLAMA_125M["vocab_size"])


if __name__ == "__main__":
    main()

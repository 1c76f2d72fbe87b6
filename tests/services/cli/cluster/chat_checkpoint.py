"""A small random checkpoint for chats: byte-level tokenizer and a chat template."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from tests.support.engine.checkpoints import write_llama

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_chat_checkpoint(folder: Path, *, max_position_embeddings: int = 144) -> Path:
    """Generates random text in a context of `max_position_embeddings` tokens; returns `folder`."""
    vocab_size = write_byte_tokenizer(folder, TEMPLATE)
    write_llama(folder, vocab_size=vocab_size, max_position_embeddings=max_position_embeddings)
    return folder


def write_byte_tokenizer(folder: Path, chat_template: str) -> int:
    """Returns the number of its tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<pad>", "<s>", "</s>", *alphabet]
    tokenizer = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"chat_template": chat_template, "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return len(tokens)

"""A model directory without weights: a byte-level BPE trained here, and a ChatML template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from services.gateway.models.model_check import checked_files
from services.gateway.models.served_text import ServedText, TextLoader, process_setup
from services.gateway.preparation.preparation_pool import PreparationPool
from services.gateway.structured.grammars.checks import GrammarChecks
from services.gateway.structured.tools.families import PLAIN
from services.gateway.structured.tools.family import Family
from services.gateway.text.model_files import ModelFiles

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS_TOKEN_ID = 2
CHAT_TEMPLATE = """
{%- for message in messages %}
    {%- if message.role == 'assistant' and loop.first %}
        {{- raise_exception('the first message must not be the assistant\\'s') }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
CORPUS = ["the quick brown fox jumps over the lazy dog", "hello world, how are you today?"] * 4


def write_model_dir(
    path: Path, *, corpus: Sequence[str] = CORPUS, chat_template: str = CHAT_TEMPLATE
) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    _write(path / "tokenizer_config.json", chat_template=chat_template, eos_token="<|im_end|>")
    _write(path / "generation_config.json", eos_token_id=[EOS_TOKEN_ID, 0], temperature=0.7)
    _write(path / "config.json", max_position_embeddings=512, hidden_size=4)
    return path


def _write(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(fields))


def served_text(files: ModelFiles, family: Family = PLAIN) -> ServedText:
    """Returns the text side of a model whose processes never start."""
    model = checked_files(files, family)
    setup = process_setup(model, "template")
    pool = PreparationPool(setup)
    return TextLoader(pool, GrammarChecks(pool), tool_format="template").text(model, setup)


def without_process(text: ServedText) -> ServedText:
    """No process loads its tokenizer."""

    async def nothing() -> None:
        pass

    text.renderer.load_tokenizer = nothing  # type: ignore[method-assign]
    return text

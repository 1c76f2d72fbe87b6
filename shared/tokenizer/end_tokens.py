"""The tokens that end an answer: for the gateway, which names them to workers and grammars, and for
the workers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from shared.errors import CheckpointError
from shared.tokenizer.checkpoint_file import UNREADABLE, exists, read_checkpoint_json, reason_of
from shared.tokenizer.special_tokens import SpecialTokens, read_special_tokens
from shared.tokenizer.tokenizer_text import token_id, tokenizer_text

GENERATION_FILE, CONFIG_FILE = "generation_config.json", "config.json"
Ids = int | Annotated[list[int], Meta(max_length=256)] | None

_T = TypeVar("_T")


class _Ends(msgspec.Struct, frozen=True):
    eos_token_id: Ids = None


class _Config(_Ends, frozen=True):
    text_config: _Ends | None = None


def end_token_ids(
    model_dir: Path, special: SpecialTokens | None = None, tokenizer: str | None = None
) -> tuple[int, ...]:
    """Returns the end tokens of both configurations and of the tokenizer, as vLLM ends answers:
    fine-tunes often change only one of them. `special` are its special tokens; `tokenizer` is the
    text of its `tokenizer.json` (default: each is read). Raises CheckpointError.
    """
    config = _read(model_dir / CONFIG_FILE, _Config)
    own = config.eos_token_id
    if own is None and config.text_config is not None:
        own = config.text_config.eos_token_id
    generation = _read(model_dir / GENERATION_FILE, _Ends).eos_token_id
    special = read_special_tokens(model_dir) if special is None else special
    of_tokenizer = _of_tokenizer(model_dir, special, tokenizer)
    return tuple(dict.fromkeys((*_listed(generation), *_listed(own), *of_tokenizer)))


def _of_tokenizer(
    model_dir: Path, special: SpecialTokens, tokenizer: str | None
) -> tuple[int, ...]:
    text = special.texts.get("eos_token")
    if text is None:
        return ()
    if tokenizer is None:
        if not exists(model_dir / "tokenizer.json") and not exists(model_dir / "tiktoken.model"):
            return ()
        tokenizer = tokenizer_text(model_dir, special)
    try:
        found = token_id(tokenizer, text)
    except UNREADABLE as error:
        raise CheckpointError(f"{model_dir}: tokenizer: {reason_of(error)}") from None
    return () if found is None else (found,)


def _listed(given: Ids) -> tuple[int, ...]:
    if given is None:
        return ()
    return (given,) if isinstance(given, int) else tuple(given)


def _read(path: Path, kind: type[_T]) -> _T:
    return read_checkpoint_json(path, kind) if exists(path) else kind()

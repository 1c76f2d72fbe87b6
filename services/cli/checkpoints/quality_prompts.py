"""The prompts of a file: texts, or token ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from services.cli.options import read_given_file
from shared.errors import ConfigError
from shared.transport.wire_errors import UNREADABLE, one_line

SHOWN_CHARS = 60
_TokenId = Annotated[int, msgspec.Meta(ge=0)]
_Prompt = str | list[_TokenId]


class _PromptLine(msgspec.Struct):
    prompt: _Prompt


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt. `line` is its line of the file, from 1 on. `content` is a text, or token ids."""

    line: int
    content: str | list[int]

    @property
    def shown(self) -> str:
        if isinstance(self.content, str):
            printable = "".join(each if each.isprintable() else " " for each in self.content)
            text = " ".join(printable.split())
        else:
            text = str(self.content[:SHOWN_CHARS])
        return text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 1]}…"


def read_prompts(path: Path) -> list[Prompt]:
    """Returns the prompts of a file, one a line: a text, or in a `.jsonl` file a JSON string, an
    array of token ids, or an object with either as `prompt`. Raises ConfigError.
    """
    data = read_given_file(path, what="prompts")
    try:
        lines = data.decode("utf-8-sig").split("\n")  # other ends of lines may be in a JSON string
    except UnicodeDecodeError as error:
        raise ConfigError(f"prompts {path}: not UTF-8: {error}") from None
    is_json = path.suffix == ".jsonl"
    found = [
        Prompt(number, _parsed(path, number, line) if is_json else line.strip())
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not found:
        raise ConfigError(f"prompts {path}: no prompt, one a line")
    for each in found:
        if not each.content:
            raise ConfigError(f"prompts {path}: line {each.line} is an empty prompt")
    return found


def _parsed(path: Path, number: int, line: str) -> str | list[int]:
    try:
        found = msgspec.json.decode(line, type=_Prompt | _PromptLine)
    except UNREADABLE as error:
        reason = one_line(error)
        raise ConfigError(f"prompts {path}: line {number}: {reason}") from None
    return found.prompt if isinstance(found, _PromptLine) else found


def token_ids_of(
    prompts: list[Prompt], model_dir: Path, *, vocab_size: int, max_tokens: int
) -> list[list[int]]:
    """Returns the token ids of a prompt.

    Raises ConfigError for a prompt that the model cannot read, CheckpointError for a checkpoint
    without a tokenizer for texts.
    """
    encoded = [each.content for each in prompts]
    if any(isinstance(each, str) for each in encoded):
        encode = _encoder(model_dir)
        encoded = [encode(each) if isinstance(each, str) else each for each in encoded]
    ids = [each for each in encoded if not isinstance(each, str)]
    for prompt, token_ids in zip(prompts, ids, strict=True):
        where = f"prompts: line {prompt.line}"
        if not token_ids:
            raise ConfigError(f"{where} has no token")
        if len(token_ids) > max_tokens:
            raise ConfigError(f"{where} has {len(token_ids)} tokens, the model {max_tokens}")
        if max(token_ids) >= vocab_size:
            raise ConfigError(f"{where}: token {max(token_ids)} is not below {vocab_size}")
    return ids


def _encoder(model_dir: Path) -> Callable[[str], list[int]]:
    """Returns an encoder that treats a text as a prompt of text completions."""
    from services.gateway.text.tokenizer import PromptTokenizer
    from shared.tokenizer.special_tokens import read_special_tokens
    from shared.tokenizer.tokenizer_text import tokenizer_text

    text = tokenizer_text(model_dir, read_special_tokens(model_dir))
    tokenizer = PromptTokenizer(text, place=str(model_dir))
    return lambda prompt: tokenizer.encode_with_offsets(prompt, add_special_tokens=True)[0]

"""Prompt pieces to token ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from services.gateway.text.chat_template import LiteralText
from shared.errors import ConfigError


class PromptTokenizer:
    """Two views of one `tokenizer.json`: special tokens count, or are ordinary characters."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the file cannot be read as a tokenizer."""
        try:
            text = path.read_text(encoding="utf-8")
            self.tokenizer = Tokenizer.from_str(text)
            self._literal = Tokenizer.from_str(text)
        except Exception as error:  # tokenizers raises a bare Exception
            raise ConfigError(f"cannot read the tokenizer {path}: {error}") from error
        for each in (self.tokenizer, self._literal):
            each.no_padding()
            each.no_truncation()
        self._literal.encode_special_tokens = True

    @property
    def special_tokens(self) -> list[str]:
        added = self.tokenizer.get_added_tokens_decoder().values()
        return [token.content for token in added if token.special]

    @property
    def vocab_size(self) -> int:
        return int(self.tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, pieces: Sequence[str]) -> list[int]:
        """No token is added: a chat template writes the first one itself."""
        token_ids: list[int] = []
        for piece in pieces:
            view = self._literal if isinstance(piece, LiteralText) else self.tokenizer
            token_ids += view.encode(piece, add_special_tokens=False).ids
        return token_ids

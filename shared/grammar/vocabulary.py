"""The vocabulary of a model, as grammars need it: the bytes of each token."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from llguidance import LLTokenizer

from shared.errors import CheckpointError
from shared.grammar.matcher import Matcher, compile_grammar
from shared.tokenizer.tokenizer_file import TOKENIZER_FILE, tokenizer_file


class Vocabulary:
    """Makes matchers. Compiling releases the GIL; it may be called from any thread."""

    def __init__(
        self, tokenizer_json: str, *, vocab_size: int | None, eos_token_ids: Collection[int]
    ) -> None:
        """`tokenizer_json`: of Hugging Face's tokenizers. `vocab_size`: of the model's logits; it
        may exceed the tokenizer's, and the other ids are never allowed; None: the tokenizer's.
        `eos_token_ids` are allowed where a grammar may end.

        Takes 0.8 s for 131,072 tokens. Raises CheckpointError for a tokenizer that cannot be read.
        """
        if not eos_token_ids:
            raise CheckpointError("no end-of-sequence token, with which a grammar could end")
        try:
            self._tokenizer = LLTokenizer(
                tokenizer_json, n_vocab=vocab_size, eos_token=sorted(eos_token_ids)
            )
        except ValueError as error:
            raise CheckpointError(f"{TOKENIZER_FILE}: {error}") from error
        self.vocab_size = self._tokenizer.vocab_size
        self.compile("regex", "a").fill()  # the first grammar takes longer

    def compile(self, kind: str, source: str) -> Matcher:
        """`kind` and `source` as in `GrammarSpec`. Raises InvalidRequest and GrammarTooComplex."""
        return compile_grammar(self._tokenizer, kind, source)

    def encode(self, text: str) -> list[int]:
        """Token ids whose bytes are those of the text, without special tokens."""
        return self._tokenizer.tokenize_str(text)

    def decode(self, token_ids: Collection[int]) -> bytes:
        return self._tokenizer.decode_bytes(list(token_ids))


def load_vocabulary(
    model_dir: Path, *, vocab_size: int | None, eos_token_ids: Collection[int]
) -> Vocabulary:
    """Of a model's folder; parameters as of `Vocabulary`. Raises CheckpointError."""
    try:
        tokenizer_json = tokenizer_file(model_dir).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{TOKENIZER_FILE} cannot be read: {error}") from error
    return Vocabulary(tokenizer_json, vocab_size=vocab_size, eos_token_ids=eos_token_ids)

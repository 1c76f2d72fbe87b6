"""The vocabulary of a model, as grammars need it: the bytes of each token."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

import xxhash
from llguidance import LLTokenizer

from shared.errors import CheckpointError, GrammarFailed
from shared.grammar.matcher import Matcher, compile_grammar
from shared.grammar.number_end import NumberEnd
from shared.tokenizer.special_tokens import read_special_tokens
from shared.tokenizer.tokenizer_file import TOKENIZER_FILE
from shared.tokenizer.tokenizer_text import tokenizer_text


class Vocabulary:
    """Makes matchers. Compiling releases the GIL; it may be called from any thread."""

    def __init__(
        self,
        tokenizer_json: str,
        *,
        vocab_size: int | None,
        eos_token_ids: Collection[int],
        read_again: Callable[[], str] | None = None,
    ) -> None:
        """Reads `tokenizer_json`, a tokenizer of Hugging Face. `vocab_size` is that of the model's
        logits; it may exceed the tokenizer's, and the other ids are never allowed; None: the
        tokenizer's. `eos_token_ids` are allowed where a grammar may end. `read_again` returns
        `tokenizer_json`; None: it is retained for good.

        Takes 0.8 s for 131,072 tokens. Raises CheckpointError for a tokenizer that cannot be read.
        """
        if not eos_token_ids:
            raise CheckpointError("no end-of-sequence token, with which a grammar could end")
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._read_again = read_again
        self._digest = _digest(tokenizer_json)
        self._lock = threading.Lock()
        self._loaded: LLTokenizer | None = self._load(tokenizer_json)
        self.vocab_size: int = self._loaded.vocab_size
        self._number_end = NumberEnd(self._loaded)  # also takes what the first grammar takes longer

    def compile(self, kind: str, source: str) -> Matcher:
        """Compiles a grammar. `kind` and `source` are as in `GrammarSpec`. Raises InvalidRequest
        and GrammarTooComplex.
        """
        return compile_grammar(self._tokenizer, kind, source, self._number_end)

    def encode(self, text: str) -> list[int]:
        """Returns token ids whose bytes are those of the text, without special tokens."""
        return self._tokenizer.tokenize_str(text)

    def decode(self, token_ids: Collection[int]) -> bytes:
        return self._tokenizer.decode_bytes(list(token_ids))

    def release(self) -> None:
        """Frees the memory of a vocabulary that can be read again, until its next use."""
        if self._read_again is not None:
            with self._lock:
                self._loaded = None

    @property
    def _tokenizer(self) -> LLTokenizer:
        """The tokenizer. Raises GrammarFailed if it must be read again and has changed."""
        with self._lock:
            if self._loaded is None:
                assert self._read_again is not None
                tokenizer_json = self._read_again()
                if _digest(tokenizer_json) != self._digest:
                    raise GrammarFailed(f"{TOKENIZER_FILE} has changed since this worker started")
                self._loaded = self._load(tokenizer_json)
            return self._loaded

    def _load(self, tokenizer_json: str) -> LLTokenizer:
        try:
            return LLTokenizer(
                tokenizer_json, n_vocab=self._vocab_size, eos_token=self._eos_token_ids
            )
        except ValueError as error:
            raise CheckpointError(f"{TOKENIZER_FILE}: {error}") from error


def load_vocabulary(
    model_dir: Path, *, vocab_size: int | None, eos_token_ids: Collection[int]
) -> Vocabulary:
    """Loads the vocabulary of a model's folder; parameters are those of `Vocabulary`. Raises
    CheckpointError.
    """
    read = partial(_read, model_dir)
    return Vocabulary(read(), vocab_size=vocab_size, eos_token_ids=eos_token_ids, read_again=read)


def _read(model_dir: Path) -> str:
    return tokenizer_text(model_dir, read_special_tokens(model_dir))


def _digest(text: str) -> bytes:
    return xxhash.xxh3_128_digest(text.encode())

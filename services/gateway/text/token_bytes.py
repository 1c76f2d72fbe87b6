"""The bytes of one token, including partial characters.

Byte-level vocabularies (GPT-2, Llama 3, Qwen) map each byte to a printable character;
SentencePiece vocabularies (Llama 2) write `▁` for a space and `<0xF0>` for a byte.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Container, Mapping, Sequence

from tokenizers import Tokenizer

from shared.tokenizer.tiktoken_model import byte_characters
from shared.tokenizer.tokenizer_steps import TokenizerSteps, flattened

MAX_CHAR_BYTES = 4
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


# Latin-1 has the same numbers as bytes; all other characters have larger ones.
_LATIN_1 = dict.fromkeys(range(256), 0xFFFF) | {
    ord(char): byte for char, byte in byte_characters().items()
}


def byte_level_bytes(token: str) -> bytes | None:
    """The bytes that a token of a byte-level vocabulary spells; None if it is no such token."""
    try:
        return token.translate(_LATIN_1).encode("latin-1")
    except UnicodeEncodeError:
        return None


def is_byte_level(steps: TokenizerSteps) -> bool:
    return any(each["type"] == "ByteLevel" for each in flattened(steps.decoder))


def complete_texts(
    steps: TokenizerSteps, vocab: Mapping[str, int], added: Container[int]
) -> dict[int, str]:
    """Returns the text of each token whose text does not depend on its neighbours: the complete
    UTF-8 tokens, if the decoder only joins bytes; else none. `added`: the ids of added tokens.
    """
    if [each["type"] for each in flattened(steps.decoder)] != ["ByteLevel"]:
        return {}
    found = {}
    for token, token_id in vocab.items():
        try:
            text = (byte_level_bytes(token) or b"").decode()
        except UnicodeDecodeError:
            continue
        if text and token_id not in added and not text.endswith("\ufffd"):
            found[token_id] = text
    return found


def _is_continuation(byte: int) -> bool:
    return byte & 0xC0 == 0x80


def _ends_inside_character(text: bytes) -> bool:
    """Whether the last bytes begin a character of UTF-8 that needs more of them."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(text)
    return bool(decoder.getstate()[0])


class TokenBytes:
    """Looks each id up once and caches the result, at most one per id of the vocabulary."""

    def __init__(self, tokenizer: Tokenizer, *, is_byte_level: bool) -> None:
        self._tokenizer = tokenizer
        self._is_byte_level = is_byte_level
        added = tokenizer.get_added_tokens_decoder()
        self._known = {token_id: token.content.encode() for token_id, token in added.items()}

    def __getitem__(self, token_id: int) -> bytes:
        """Returns no bytes for an id that is not in the vocabulary."""
        known = self._known.get(token_id)
        if known is None:
            token = self._tokenizer.id_to_token(token_id)
            known = self._known[token_id] = b"" if token is None else self._spelled(token)
        return known

    def num_partial(self, token_ids: Sequence[int]) -> int:
        """The tokens at the end that hold bytes of an incomplete character; 0 if it is complete."""
        tail = b""
        for number, token_id in enumerate(reversed(token_ids[-MAX_CHAR_BYTES:]), 1):
            tail = self[token_id] + tail
            if _ends_inside_character(tail):
                return number
            if tail and not _is_continuation(tail[0]):
                return 0
        return 0

    def _spelled(self, token: str) -> bytes:
        if self._is_byte_level:
            spelled = byte_level_bytes(token)
            return token.encode() if spelled is None else spelled
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()

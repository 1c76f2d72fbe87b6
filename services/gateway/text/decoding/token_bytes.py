"""The bytes of one token, including partial characters.

Byte-level vocabularies (GPT-2, Llama 3, Qwen) map each byte to a printable character;
SentencePiece vocabularies (Llama 2) write `▁` for a space and `<0xF0>` for a byte.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Container, Iterable, Mapping, Sequence

from services.gateway.text.decoding.packed_texts import PackedTexts, packed
from shared.tokenizer.tiktoken_model import byte_characters
from shared.tokenizer.tokenizer_steps import TokenizerSteps, flattened

MAX_CHAR_BYTES = 4
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


# Latin-1 has the same numbers as bytes; all other characters have larger ones.
_LATIN_1 = dict.fromkeys(range(256), 0xFFFF) | {
    ord(char): byte for char, byte in byte_characters().items()
}


def byte_level_bytes(token: str) -> bytes | None:
    """Returns the bytes that a token of a byte-level vocabulary spells, or None if it is no such
    token.
    """
    try:
        return token.translate(_LATIN_1).encode("latin-1")
    except UnicodeEncodeError:
        return None


def is_byte_level(steps: TokenizerSteps) -> bool:
    return any(each["type"] == "ByteLevel" for each in flattened(steps.decoder))


def complete_texts(
    steps: TokenizerSteps, spellings: Iterable[str | None], added: Container[int]
) -> PackedTexts:
    """Returns the text of each token whose text does not depend on its neighbours: the complete
    UTF-8 tokens, if the decoder only joins bytes; else none. `spellings`: by id; `added`: the ids
    of added tokens.
    """
    if [each["type"] for each in flattened(steps.decoder)] != ["ByteLevel"]:
        return PackedTexts()
    return packed(
        None if token is None or token_id in added else _complete_text(token)
        for token_id, token in enumerate(spellings)
    )


def _complete_text(token: str) -> str | None:
    try:
        text = (byte_level_bytes(token) or b"").decode()
    except UnicodeDecodeError:
        return None
    return None if text.endswith("\ufffd") else text or None


def _is_continuation(byte: int) -> bool:
    return byte & 0xC0 == 0x80


def _ends_inside_character(text: bytes) -> bool:
    """Returns whether the last bytes begin a character of UTF-8 that needs more of them."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(text)
    return bool(decoder.getstate()[0])


class TokenBytes:
    """`added_ids`: the ids of added tokens by their texts, which are spelled as they are."""

    def __init__(
        self, spellings: PackedTexts, added_ids: Mapping[str, int], *, is_byte_level: bool
    ) -> None:
        self._spellings = spellings
        self._is_byte_level = is_byte_level
        self._added = {token_id: text.encode() for text, token_id in added_ids.items()}

    def __getitem__(self, token_id: int) -> bytes:
        """Returns no bytes for an id that is not in the vocabulary."""
        added = self._added.get(token_id)
        if added is not None:
            return added
        token = self._spellings[token_id]
        return b"" if token is None else self._spelled(token)

    def num_partial(self, token_ids: Sequence[int]) -> int:
        """Returns the number of tokens at the end that hold bytes of an incomplete character; 0 if
        it is complete.
        """
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

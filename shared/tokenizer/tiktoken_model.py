"""Converts a `tiktoken.model` to the `tokenizer.json` with the same ids. Pure.

tiktoken merges the two neighbours that form the token of the least rank, the leftmost of equal
ones. A list of pairs in the order of the ranks does the same if it has one pair for a token: the
last two parts of that token alone, since as long as no merge has crossed its ends, the merges
within it are those of the token alone. A token that cannot be formed is found as a whole word only,
which `ignore_merges` stands for.

The split pattern is in the code of a checkpoint, which is not run: that of Kimi K2 is known.
"""

from __future__ import annotations

import binascii
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import msgspec

from shared.errors import CheckpointError

KIMI_MODULE = "tokenization_kimi."  # prefix of the class that checkpoints name
_HAN, _MARKS = r"[\p{Han}]+", r"\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
_UPPER, _LOWER = rf"[\p{{Lu}}\p{{Lt}}{_MARKS}]", rf"[\p{{Ll}}{_MARKS}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI = "|".join(
    (
        _HAN,
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
NUM_RESERVED = 256  # ids behind the ranks, of which a config names some

Ranks = Mapping[bytes, int]


class AddedToken(msgspec.Struct, frozen=True):
    """A token as `tokenizer_config.json` describes it."""

    content: str
    special: bool = True
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False


def read_ranks(data: bytes) -> dict[bytes, int]:
    """Reads lines of a token in base64 and its rank.

    Raises CheckpointError for another line, or unless the ranks count from 0 and every
    byte is a token.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[binascii.a2b_base64(token, strict_mode=True)] = int(rank)
        except ValueError as error:
            raise CheckpointError(f"line {number} is no token and rank: {error}") from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise CheckpointError(f"ranks of {len(ranks)} tokens do not count from 0")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise CheckpointError(f"byte {missing[0]} is no token")
    return ranks


def tokenizer_json(ranks: Ranks, added: Mapping[int, AddedToken], pattern: str) -> dict[str, Any]:
    """Returns the content of `tokenizer.json`. The ids behind the ranks that `added` does not name
    are `<|reserved_token_N|>`. Raises CheckpointError for an added token with the id of a rank.
    """
    by_id = sorted(ranks, key=ranks.__getitem__)
    merges = (_last_merge(token, ranks) for token in by_id)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(len(ranks), added),
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": pattern},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {
                    "type": "ByteLevel",
                    "add_prefix_space": False,
                    "trim_offsets": True,
                    "use_regex": False,
                },
            ],
        },
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {_spelled(token): token_id for token_id, token in enumerate(by_id)},
            "merges": [[_spelled(part) for part in pair] for pair in merges if pair],
        },
    }


def _added_tokens(num_ranks: int, added: Mapping[int, AddedToken]) -> list[dict[str, Any]]:
    end = num_ranks + NUM_RESERVED
    for token_id, token in added.items():
        if not num_ranks <= token_id < end:
            raise CheckpointError(
                f"added token {token.content!r} has id {token_id}, not {num_ranks} to {end - 1}"
            )
    return [
        {
            "id": token_id,
            **msgspec.structs.asdict(
                added.get(token_id, AddedToken(f"<|reserved_token_{token_id}|>"))
            ),
        }
        for token_id in range(num_ranks, end)
    ]


def _last_merge(token: bytes, ranks: Ranks) -> list[bytes] | None:
    """Returns the two parts from which the token is formed; None if merges do not
    come to two parts.
    """
    parts = [token[at : at + 1] for at in range(len(token))]
    rank = ranks[token]
    while len(parts) > 2:
        found = [
            (ranks.get(left + right, rank), at) for at, (left, right) in enumerate(pairwise(parts))
        ]
        least, at = min(found)
        if least >= rank:
            return None
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts if len(parts) == 2 else None


def byte_characters() -> dict[str, int]:
    """Returns GPT-2's table: printable Latin-1 maps to itself, other bytes to
    characters from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + number): byte for number, byte in enumerate(others)}


_CHARACTER_OF = {byte: char for char, byte in byte_characters().items()}


def _spelled(token: bytes) -> str:
    return "".join(_CHARACTER_OF[byte] for byte in token)

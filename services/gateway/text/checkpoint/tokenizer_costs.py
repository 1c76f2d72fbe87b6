"""What a `tokenizer.json` can cost: its steps are a program, and its patterns may be hostile.

Decoding runs on the event loop, so a decoder with a step that is not listed here is refused.
Encoding with steps that are not listed runs in a preparation process, which can be killed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf, prod
from typing import Any

import msgspec

from services.gateway.text.tiktoken_bpe import PATTERNS
from shared.errors import ConfigError

MAX_TOKEN_CHARS = 16_384
MAX_ADDED_TOKENS = 16_384
MAX_STEPS = 32
MAX_PREPENDED_CHARS = 16  # to each text, by one step
MAX_GROWTH = 4  # of a text by the replacements of all steps together
_SUFFIX = "</w>"  # of BPEDecoder's words, by default
_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents"}
_SPLITS = {"ByteLevel", "Digits", "Metaspace", "Punctuation", "Whitespace", "WhitespaceSplit"}
_DECODERS = {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Strip", "WordPiece", "BPEDecoder"}

Step = dict[str, Any]


class _Model(msgspec.Struct, frozen=True):
    type: str = ""


class _AddedToken(msgspec.Struct, frozen=True):
    content: str = ""


class _File(msgspec.Struct, frozen=True):
    model: _Model = _Model()
    normalizer: Step | None = None
    pre_tokenizer: Step | None = None
    decoder: Step | None = None
    added_tokens: list[_AddedToken] = []


def has_known_cost(source: str) -> bool:
    """Whether encoding takes time and memory linear in the text. `source`: the text of a
    `tokenizer.json`.
    """
    file = msgspec.json.decode(source, type=_File)
    normalizers, splits = list(_steps(file.normalizer)), list(_steps(file.pre_tokenizer))
    return (
        file.model.type == "BPE"
        and _growth(normalizers) <= MAX_GROWTH
        and len(normalizers) + len(splits) <= MAX_STEPS
        and all(map(_is_known_normalizer, normalizers))
        and all(map(_is_known_split, splits))
    )


def check_decoding(source: str) -> None:
    """Raises ConfigError for a decoder that may take more than its tokens have text, or for more
    added tokens than each text can be searched for.
    """
    file = msgspec.json.decode(source, type=_File)
    if len(file.added_tokens) > MAX_ADDED_TOKENS:
        num_added = len(file.added_tokens)
        raise ConfigError(f"it has {num_added} added tokens, the limit is {MAX_ADDED_TOKENS}")
    steps = list(_steps(file.decoder))
    if len(steps) > MAX_STEPS:
        raise ConfigError(f"its decoder has {len(steps)} steps, the limit is {MAX_STEPS}")
    for kind in (each["type"] for each in steps):
        if kind != "Replace" and kind not in _DECODERS:
            raise ConfigError(f"its decoder has a step {kind[:40]!r}, which is not supported")
    growth = _growth(steps)
    if growth > MAX_GROWTH:
        raise ConfigError(
            f"its decoder may make a text {growth:.3g} times as long, the limit is {MAX_GROWTH}"
        )


def check_token_lengths(vocab: dict[str, int]) -> None:
    """Raises ConfigError."""
    longest = max(map(len, vocab), default=0)
    if longest > MAX_TOKEN_CHARS:
        raise ConfigError(f"it has a token of {longest} characters, limit {MAX_TOKEN_CHARS}")


def _growth(steps: Iterable[Step]) -> float:
    """The most by which the replacements of all steps together multiply the length of a text:
    infinite for one by a pattern.
    """
    return prod(map(_growth_of, steps))


def _growth_of(step: Step) -> float:
    if step["type"] == "BPEDecoder":  # replaces each suffix by a space
        replaced, content = step.get("suffix", _SUFFIX), " "
    elif step["type"] == "Replace":
        replaced, content = step["pattern"].get("String"), step["content"]
    else:
        return 1.0
    if replaced is None:
        return inf
    if not replaced:  # the content goes around each character
        return 2.0 + len(content)
    return max(1.0, len(content) / len(replaced))


def _is_known_normalizer(step: Step) -> bool:
    if step["type"] == "Prepend":
        return len(step["prepend"]) <= MAX_PREPENDED_CHARS
    return step["type"] == "Replace" or step["type"] in _NORMALIZERS


def _is_known_split(step: Step) -> bool:
    if step["type"] == "Split":
        pattern = step["pattern"]
        return "String" in pattern or pattern.get("Regex") in PATTERNS
    return step["type"] in _SPLITS


def _steps(step: Step | None) -> Iterator[Step]:
    """Those of sequences, without the sequences."""
    if step is None:
        return
    if step["type"] != "Sequence":
        yield step
    for name in ("normalizers", "pretokenizers", "decoders"):
        for part in step.get(name) or ():
            yield from _steps(part)

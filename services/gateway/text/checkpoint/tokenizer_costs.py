"""Bounds the cost of a `tokenizer.json`: its steps are a program, and its patterns may be hostile.

Decoding runs on the event loop, so a decoder with a step that is not listed here is refused.
Encoding with steps that are not listed runs in a preparation process, which can be killed.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Sequence
from functools import reduce
from math import ceil, inf, prod

import msgspec

from services.gateway.text.tiktoken_bpe import PATTERNS
from shared.errors import ConfigError
from shared.tokenizer.checkpoint_file import UNREADABLE
from shared.tokenizer.tokenizer_steps import Step, TokenizerSteps, flattened

MAX_TOKEN_CHARS = 16_384
MAX_ADDED_TOKENS = 16_384
MAX_STEPS = 32
MAX_PREPENDED_CHARS = 16  # characters that one step adds to each text
MAX_GROWTH = 4  # factor by which the replacements of all steps lengthen a text
# Characters for a text of one, also in a preparation process: SentencePiece's own map writes 18.
MAX_ENCODED_GROWTH = 256
MAX_AFFIX_CHARS = 16  # such as "##" and "</w>"
# The largest tokenizers have some 260,000 tokens and 580,000 merges.
MAX_VOCABULARY = 1 << 20
MAX_MERGES = 5 << 19
MAX_TOKEN_IDS = 4 * MAX_VOCABULARY  # models leave ids out
_SUFFIX = "</w>"  # BPEDecoder's default
_CHAR = (
    r"(?:[^][\\(){}|?*+^$]|\\[sSdDwWtnrfvhH]|\\[^\w\s]|\\[pP]\{\^?\w+\}|\[\^?(?:[^][\\]|\\.)+\])"
)
_TAKES_CHARS = re.compile(rf"(?:{_CHAR}(?:\+|\{{[1-9]\d*,?\}})?)+")  # a pattern with no empty match
# The most characters that a step writes for one (UAX #15; of the lower case of U+0130).
_EXPANSIONS = {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 2}
_NORMALIZERS = {*_EXPANSIONS, "Strip", "StripAccents"}
_SPLITS = {"ByteLevel", "Digits", "Metaspace", "Punctuation", "Whitespace", "WhitespaceSplit"}
_DECODERS = {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Strip", "WordPiece", "BPEDecoder"}


def has_known_cost(steps: TokenizerSteps) -> bool:
    """Returns whether encoding takes time and memory linear in the text."""
    normalizers, splits = list(flattened(steps.normalizer)), list(flattened(steps.pre_tokenizer))
    return (
        steps.model.type == "BPE"
        and _growth(normalizers) <= MAX_GROWTH
        and len(normalizers) + len(splits) <= MAX_STEPS
        and all(map(_is_known_normalizer, normalizers))
        and all(map(_is_known_split, splits))
    )


def most_chars_of_one(steps: TokenizerSteps) -> int:
    """Returns the most characters that the normalizers of a tokenizer with a known cost write for
    one character. A form of Unicode does not expand again what another has expanded.
    """
    normalizers = list(flattened(steps.normalizer))
    expansion = max([1, *(_EXPANSIONS.get(each["type"], 1) for each in normalizers)])
    return ceil(expansion * _growth(normalizers))


class _CountedModel(msgspec.Struct, frozen=True):
    vocab: dict[str, msgspec.Raw] | list[msgspec.Raw] = {}
    merges: list[msgspec.Raw] = []


class _CountedFile(msgspec.Struct, frozen=True):
    model: _CountedModel = _CountedModel()


def check_size(source: str) -> None:
    """Raises ConfigError for the text of a `tokenizer.json` with too large a vocabulary; not for
    one that is invalid, which its reader names.
    """
    try:
        model = msgspec.json.decode(source, type=_CountedFile).model
    except UNREADABLE:
        return
    for what, entries, most in (
        ("tokens", model.vocab, MAX_VOCABULARY),
        ("merges", model.merges, MAX_MERGES),
    ):
        if len(entries) > most:
            raise ConfigError(f"it has {len(entries)} {what}, the limit is {most}")


def check_steps(steps: TokenizerSteps) -> None:
    """Raises ConfigError for steps that may make a long text, or many tokens, of a short one, and
    for more added tokens than each text can be searched for.
    """
    num_added = len(steps.added_tokens)
    if num_added > MAX_ADDED_TOKENS:
        raise ConfigError(f"it has {num_added} added tokens, the limit is {MAX_ADDED_TOKENS}")
    _check_decoding(list(flattened(steps.decoder)))
    most = reduce(_most_chars, flattened(steps.normalizer), 1.0)
    _check_growth("normalizer", most, MAX_ENCODED_GROWTH)
    for affix in (steps.model.continuing_subword_prefix, steps.model.end_of_word_suffix):
        if affix is not None and len(affix) > MAX_AFFIX_CHARS:
            raise ConfigError(f"its model writes {len(affix)} characters at each one of a word")
    for each in flattened(steps.post_processor):
        num_copies = sum("Sequence" in piece for piece in each.get("single") or ())
        if num_copies > 1:
            raise ConfigError(f"its post-processor writes a text {num_copies} times")


def _check_decoding(decoders: Sequence[Step]) -> None:
    if len(decoders) > MAX_STEPS:
        raise ConfigError(f"its decoder has {len(decoders)} steps, the limit is {MAX_STEPS}")
    for kind in (each["type"] for each in decoders):
        if kind != "Replace" and kind not in _DECODERS:
            raise ConfigError(f"its decoder has a step {kind[:40]!r}, which is not supported")
    _check_growth("decoder", _growth(decoders), MAX_GROWTH)


def _check_growth(what: str, growth: float, most: int) -> None:
    if growth > most:
        raise ConfigError(
            f"its {what} may make a text {growth:.3g} times as long, the limit is {most}"
        )


def check_token_lengths(vocab: dict[str, int]) -> None:
    """Raises ConfigError for a token that is too long."""
    longest = max(map(len, vocab), default=0)
    if longest > MAX_TOKEN_CHARS:
        raise ConfigError(f"it has a token of {longest} characters, limit {MAX_TOKEN_CHARS}")


def _growth(steps: Iterable[Step]) -> float:
    """Returns the factor by which the replacements of all steps may lengthen a text: infinite for a
    replacement by a pattern.
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


def _most_chars(num_chars: float, step: Step) -> float:
    """Returns the most characters that a step makes of a text: a pattern may match nothing, around
    each character.
    """
    if step["type"] == "Prepend":
        return num_chars + len(step["prepend"])
    if step["type"] == "Precompiled":
        return num_chars * _longest_mapped(step["precompiled_charsmap"])
    if step["type"] != "Replace":
        return num_chars
    replaced, content = step["pattern"].get("String"), len(step["content"])
    if replaced or (replaced is None and _TAKES_CHARS.fullmatch(step["pattern"].get("Regex", ""))):
        return num_chars * max(1.0, content / len(replaced or "x"))
    return num_chars + (num_chars + 1) * content


def _longest_mapped(charsmap: str | None) -> int:
    """Returns the most characters that SentencePiece's map writes for one: its texts end in NUL and
    follow a trie with its size.
    """
    data = base64.b64decode(charsmap or "")
    texts = data[4 + int.from_bytes(data[:4], "little") :]
    return max(1, *(len(each.decode(errors="replace")) for each in texts.split(b"\0")))


def _is_known_normalizer(step: Step) -> bool:
    if step["type"] == "Prepend":
        return len(step["prepend"]) <= MAX_PREPENDED_CHARS
    return step["type"] == "Replace" or step["type"] in _NORMALIZERS


def _is_known_split(step: Step) -> bool:
    if step["type"] == "Split":
        pattern = step["pattern"]
        return "String" in pattern or pattern.get("Regex") in PATTERNS
    return step["type"] in _SPLITS

"""Encodes text with tiktoken, several times faster than tokenizers, for models where both provably
return the same ids: byte-level BPE whose words are split by one of the patterns below.

tokenizers merges the pairs of a list, in list order; tiktoken merges any two neighbours that form
a token, in id order. Assume a list in the order of the ids that it forms, and only those tokens of
the vocabulary that the list forms from their text. As long as no merge has crossed the ends of a
substring, the merges within it equal those of the substring alone. So two neighbours that form a
token are the last two parts of that token alone: a pair of the list, and the only pair that occurs
for this token. Both take the same steps.

Neither caches words: from the timing, a tenant could infer the words of others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import NamedTuple

import msgspec
import tiktoken
from tokenizers import AddedToken, Tokenizer, models, normalizers

from services.gateway.text.decoding.token_bytes import byte_level_bytes
from shared.tokenizer.tiktoken_model import KIMI
from shared.tokenizer.tokenizer_steps import TokenizerSteps

# Patterns of GPT-2, Llama 3, Qwen 2 (and Kimi K2, whose own tokenizer is tiktoken).
# Each matches any text: tiktoken drops unmatched characters.
GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_2 = LLAMA_3.replace("{1,3}", "")
PATTERNS = (GPT_2, LLAMA_3, QWEN_2, KIMI)
# A million characters of white space overflow the stack of tiktoken's pattern matching.
MAX_CHARS = 250_000

Encode = Callable[[str], list[int]]


class _PreTokenizer(msgspec.Struct, frozen=True):
    type: str
    pretokenizers: list[_PreTokenizer] = []
    add_prefix_space: bool = True
    use_regex: bool = True
    pattern: dict[str, str] = {}
    behavior: str = ""
    invert: bool = False


class _BpeModel(msgspec.Struct, frozen=True):
    type: str = ""
    merges: list[str | tuple[str, str]] = []
    dropout: float | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None
    ignore_merges: bool = False


class _BpeFile(msgspec.Struct, frozen=True):
    model: _BpeModel


class Encoders(NamedTuple):
    """`is_fast`: whether both encoders let other threads run, for texts of at most MAX_CHARS."""

    marked: Encode
    literal: Encode
    is_fast: bool = False


def encoders(
    source: str,
    steps: TokenizerSteps,
    vocab: dict[str, int],
    marked: Tokenizer,
    literal: Tokenizer,
) -> Encoders:
    """Returns encoders for two views of the `tokenizer.json` `source`: special tokens recognized,
    or encoded as ordinary characters. Each uses tiktoken where the ids are the same. Neither adds
    tokens. `vocab`: without added tokens. Both share a model without a cache.
    """
    own_marked, own_literal = _encode_of(marked), _encode_of(literal)
    added = marked.get_added_tokens_decoder()
    try:
        are_found = _are_found_as_they_are(added.values(), steps)
        encode = _encode_words(source, steps, vocab, marked.model) if are_found else None
    except (msgspec.DecodeError, LookupError, ValueError):
        return Encoders(own_marked, own_literal)  # a file that `_BpeFile` does not cover
    if encode is None:
        return Encoders(own_marked, own_literal)
    ids = {token.content: token_id for token_id, token in added.items()}
    faster = _bounded(_cut_at(ids, encode), own_marked)
    if all(token.special for token in literal.get_added_tokens_decoder().values()):
        return Encoders(faster, _bounded(encode, own_literal), is_fast=True)
    return Encoders(faster, own_literal)


def _encode_of(tokenizer: Tokenizer) -> Encode:
    def encode(text: str) -> list[int]:
        token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return token_ids

    return encode


def _bounded(faster: Encode, own: Encode) -> Encode:
    return lambda text: faster(text) if len(text) <= MAX_CHARS else own(text)


def _cut_at(ids: dict[str, int], encode: Encode) -> Encode:
    """Encodes added tokens, matched longest first, and the text between them."""
    if not ids:
        return encode
    literals = sorted(ids, key=len, reverse=True)
    pattern = re.compile(f"({'|'.join(map(re.escape, literals))})")

    def encode_with_added(text: str) -> list[int]:
        token_ids: list[int] = []
        for index, part in enumerate(pattern.split(text)):
            if index % 2:
                token_ids.append(ids[part])
            elif part:
                token_ids += encode(part)
        return token_ids

    return encode_with_added


def _are_found_as_they_are(added: Collection[AddedToken], steps: TokenizerSteps) -> bool:
    """Returns whether added tokens match in one pass, before normalization, without adjacent
    spaces.
    """
    return len({token.normalized for token in added}) <= 1 and not any(
        token.single_word or token.lstrip or token.rstrip or (token.normalized and steps.normalizer)
        for token in added
    )


def _encode_words(
    source: str, steps: TokenizerSteps, vocab: dict[str, int], merging: models.Model
) -> Encode | None:
    """Returns a tiktoken encoder for text without added tokens, or None if ids could differ."""
    pattern = _pattern_of(msgspec.convert(steps.pre_tokenizer, _PreTokenizer | None))
    if pattern is None or steps.normalizer not in (None, {"type": "NFC"}):
        return None
    if not isinstance(merging, models.BPE):
        return None
    ranks = _ranks_of(msgspec.json.decode(source, type=_BpeFile).model, vocab, merging)
    if ranks is None:
        return None
    encoding = tiktoken.Encoding("model", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    if steps.normalizer is None:
        return encoding.encode_ordinary
    normalized = normalizers.NFC().normalize_str
    return lambda text: encoding.encode_ordinary(text if text.isascii() else normalized(text))


def _pattern_of(pre_tokenizer: _PreTokenizer | None) -> str | None:
    match pre_tokenizer:
        case _PreTokenizer(type="ByteLevel", add_prefix_space=False, use_regex=True):
            return GPT_2
        case _PreTokenizer(
            type="Sequence",
            pretokenizers=[
                _PreTokenizer(
                    type="Split", pattern={"Regex": pattern}, behavior="Isolated", invert=False
                ),
                _PreTokenizer(type="ByteLevel", add_prefix_space=False, use_regex=False),
            ],
        ) if pattern in PATTERNS[1:]:
            return pattern
    return None


def _ranks_of(
    model: _BpeModel, vocab: dict[str, int], merging: models.BPE
) -> dict[bytes, int] | None:
    """Returns the ids of tokens that can occur, by their bytes; None if tiktoken could differ.
    `merging`: the same model, which nobody else uses yet.
    """
    if not _is_standard_bpe(model):
        return None
    merges = [_pair_of(each) for each in model.merges]
    made = [vocab[left + right] for left, right in merges]
    if made != sorted(made) or len(set(vocab.values())) < len(vocab):
        return None
    merging.ignore_merges = False
    try:
        return _ranks_by_merges(model, vocab, merging)
    finally:
        merging.ignore_merges = model.ignore_merges


def _ranks_by_merges(
    model: _BpeModel, vocab: dict[str, int], merging: models.BPE
) -> dict[bytes, int] | None:
    ranks = {}
    for text, token_id in vocab.items():
        spelled = byte_level_bytes(text)
        if not spelled:
            continue  # a special token, never part of a word
        made_of = [each.id for each in merging.tokenize(text)]
        if made_of == [token_id] or model.ignore_merges:  # the latter: as a complete word only
            ranks[spelled] = token_id
            if made_of != [token_id] and len(made_of) == 2:
                return None  # tiktoken would merge these two
    return ranks if all(bytes([byte]) in ranks for byte in range(256)) else None


def _is_standard_bpe(model: _BpeModel) -> bool:
    has_affix = model.continuing_subword_prefix or model.end_of_word_suffix
    return model.type == "BPE" and not has_affix and not model.dropout


def _pair_of(merge: str | tuple[str, str]) -> tuple[str, str]:
    """Splits a pair; older files store it as one string."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right

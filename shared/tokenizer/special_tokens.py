"""The special tokens of a checkpoint and those beside its `tokenizer.json`, as transformers reads
them: from `tokenizer_config.json`, and from `special_tokens_map.json` and `added_tokens.json` where
that has no `added_tokens_decoder`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from shared.errors import CheckpointError
from shared.tokenizer.checkpoint_file import exists, read_checkpoint_json, reason_of
from shared.tokenizer.tiktoken_model import AddedToken

CONFIG_FILE, MAP_FILE = "tokenizer_config.json", "special_tokens_map.json"
ADDED_FILE = "added_tokens.json"
STANDARD = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
MAX_ADDED = 16_384

Fields = dict[str, Any]


class SpecialTokens(NamedTuple):
    """The special tokens of a tokenizer.

    `texts` are by names such as eos_token. The tokenizer must have `added`, in order of the given
    ids; another flag replaces that of `tokenizer.json`. It must have `needed` as special tokens, if
    it does not have them as added ones yet.
    """

    texts: dict[str, str]
    added: list[AddedToken]
    needed: list[AddedToken]


def read_special_tokens(model_dir: Path) -> SpecialTokens:
    """Reads the special tokens of a folder. Raises CheckpointError."""
    fields = _read(model_dir / CONFIG_FILE)
    given = fields.get("added_tokens_decoder")
    if given is None:
        fields |= _read(model_dir / MAP_FILE)
    named = dict(_named(fields))
    extra = list(_extra(fields))
    needed = [*named.values(), *extra]
    added = _decoder(model_dir, given)
    if given is None:
        special = {token.content for token in needed}
        added = _legacy(_read(model_dir / ADDED_FILE), special)
    if len(added) + len(needed) > MAX_ADDED:
        raise CheckpointError(f"{model_dir}: more than {MAX_ADDED} tokens beside its tokenizer")
    return SpecialTokens({name: each.content for name, each in named.items()}, added, needed)


def _read(path: Path) -> Fields:
    return read_checkpoint_json(path, Fields) if exists(path) else {}


def _named(fields: Fields) -> Iterator[tuple[str, AddedToken]]:
    """Yields the standard special tokens, and those of a model's own, such as image_token, by
    name.
    """
    own = fields.get("extra_special_tokens")
    named = own if isinstance(own, dict) else {}
    for name, value in {**fields, **named}.items():
        token = _token(value) if name in STANDARD or name in named or _is_own(name) else None
        if token is not None:
            yield name, token


def _is_own(name: str) -> bool:
    return name.endswith("_token") and not name.startswith("add_")


def _extra(fields: Fields) -> Iterator[AddedToken]:
    """Yields the special tokens without names."""
    listed = fields.get("extra_special_tokens") or fields.get("additional_special_tokens")
    for value in listed if isinstance(listed, list) else ():
        token = _token(value)
        if token is not None:
            yield token


def _token(value: Any) -> AddedToken | None:
    """Reads a token. Returns None for a value that is no token, such as null."""
    if isinstance(value, str):
        return AddedToken(value)
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        flags = {name: value.get(name) is True for name in ("single_word", "lstrip", "rstrip")}
        return AddedToken(value["content"], normalized=value.get("normalized") is True, **flags)
    return None


def _decoder(model_dir: Path, given: Any) -> list[AddedToken]:
    if given is None:
        return []
    try:
        tokens = msgspec.convert(given, dict[int, _Described], strict=False)
    except (msgspec.ValidationError, RecursionError) as error:
        path = model_dir / CONFIG_FILE
        raise CheckpointError(f"{path}: added_tokens_decoder: {reason_of(error)}") from None
    return [tokens[token_id].token for token_id in sorted(tokens)]


class _Described(msgspec.Struct, frozen=True):
    """A described token, with the library's defaults, which are not those of special tokens."""

    content: str
    special: bool = False
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool | None = None

    @property
    def token(self) -> AddedToken:
        fields = msgspec.structs.asdict(self)
        normalized = not self.special if self.normalized is None else self.normalized
        return AddedToken(**{**fields, "normalized": normalized})


def _legacy(ids: Mapping[str, Any], special: set[str]) -> list[AddedToken]:
    known = {text: number for text, number in ids.items() if isinstance(number, int)}
    return [
        AddedToken(text, special=text in special, normalized=text not in special)
        for text in sorted(known, key=known.__getitem__)
    ]

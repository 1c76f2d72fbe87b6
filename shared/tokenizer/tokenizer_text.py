"""The text of a checkpoint's `tokenizer.json`, with the added tokens that its other files name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from shared.errors import CheckpointError
from shared.tokenizer.checkpoint_file import (
    MAX_TOKENIZER_BYTES,
    UNREADABLE,
    read_checkpoint_file,
    reason_of,
)
from shared.tokenizer.special_tokens import SpecialTokens
from shared.tokenizer.tiktoken_model import AddedToken
from shared.tokenizer.tokenizer_file import tokenizer_file


class _NumberedToken(AddedToken, frozen=True, kw_only=True):
    id: int


class _Vocabulary(msgspec.Struct, frozen=True):
    vocab: dict[str, int] | list[tuple[str, float]] = {}


class _TokenizerText(msgspec.Struct, frozen=True):
    added_tokens: list[_NumberedToken] = []
    model: msgspec.Raw = msgspec.Raw(b"{}")

    @property
    def ids(self) -> dict[str, int]:
        """The ids of the vocabulary. Raises msgspec.MsgspecError."""
        vocab = msgspec.json.decode(self.model, type=_Vocabulary).vocab
        if isinstance(vocab, dict):
            return vocab
        return {text: token_id for token_id, (text, _) in enumerate(vocab)}


def tokenizer_text(model_dir: Path, special: SpecialTokens) -> str:
    """Returns the text of `tokenizer.json` with the special tokens. Raises CheckpointError."""
    path = tokenizer_file(model_dir)
    try:
        text = read_checkpoint_file(path, max_bytes=MAX_TOKENIZER_BYTES).decode()
        return _with_added(text, special)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    except UNREADABLE as error:
        raise CheckpointError(f"{path}: {reason_of(error)}") from None


def vocabulary(text: str) -> dict[str, int]:
    """Returns the ids of the tokens of a `tokenizer.json` that are not added. Raises
    msgspec.MsgspecError. It takes half as long as the library's `get_vocab`.
    """
    return msgspec.json.decode(text, type=_TokenizerText).ids


def token_id(text: str, content: str) -> int | None:
    """Returns the id of a token in the text of a `tokenizer.json`. Raises msgspec.MsgspecError."""
    file = msgspec.json.decode(text, type=_TokenizerText)
    found = next((entry.id for entry in file.added_tokens if entry.content == content), None)
    return file.ids.get(content) if found is None else found


def _with_added(text: str, special: SpecialTokens) -> str:
    """Returns the text with the special tokens added. A new token has the id of the vocabulary's
    token of this text, else the next one.
    """
    file = msgspec.json.decode(text, type=_TokenizerText)
    known = {each.content: each for each in file.added_tokens}
    wanted = {token.content: token for token in special.added}
    for token in special.needed:
        if token.content not in known and token.content not in wanted:
            wanted[token.content] = token
    changed = {
        content: token
        for content, token in wanted.items()
        if content and (content not in known or _flags(known[content]) != _flags(token))
    }
    if not changed:
        return text
    ids = file.ids
    next_id = max([len(ids), *(each.id + 1 for each in known.values())])
    for content, token in changed.items():
        entry_id = known[content].id if content in known else ids.get(content, next_id)
        next_id = max(next_id, entry_id + 1)
        known[content] = _NumberedToken(id=entry_id, **_flags(token))
    fields = msgspec.json.decode(text, type=dict[str, Any])
    entries = sorted(known.values(), key=lambda each: each.id)
    fields["added_tokens"] = [{"id": each.id, **_flags(each)} for each in entries]
    return msgspec.json.encode(fields).decode()


def _flags(token: AddedToken) -> dict[str, Any]:
    return {name: getattr(token, name) for name in AddedToken.__struct_fields__}

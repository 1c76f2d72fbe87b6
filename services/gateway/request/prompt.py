"""The prompt of a request: a conversation, a text, or tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from services.gateway.text.model_files import ModelFiles
from shared.errors import InvalidRequest
from shared.messages import ModelCard

MESSAGE_CHARS = 32  # rendering cost of an empty message, in characters of text


class Echo(msgspec.Struct, frozen=True):
    """A prompt as returned to the client. `offsets`: the start of each token in `text`."""

    text: str
    token_ids: list[int]
    offsets: list[int]


class ChatPrompt(msgspec.Struct, frozen=True):
    messages: tuple[Mapping[str, Any], ...]
    parts: tuple[str, ...] = ()  # the messages rendered by the model's template

    param = "messages"

    @property
    def num_chars(self) -> int:
        """The cost of rendering and tokenizing, in characters; an empty message costs some too."""
        return sum(MESSAGE_CHARS + len(message["content"]) for message in self.messages)


class TextPrompt(msgspec.Struct, frozen=True):
    """`param`: the request field that holds the prompt."""

    text: str
    param: str
    add_special_tokens: bool = True

    @property
    def num_chars(self) -> int:
        return len(self.text)


class TokenPrompt(msgspec.Struct, frozen=True):
    token_ids: list[int]
    param: str

    @property
    def num_chars(self) -> int:
        return len(self.token_ids)


Prompt = ChatPrompt | TextPrompt | TokenPrompt


def tokenize(prompt: Prompt, files: ModelFiles, card: ModelCard) -> list[int]:
    """Raises InvalidRequest for a prompt without tokens or with one not in the vocabulary."""
    match prompt:
        case ChatPrompt():
            return files.tokenizer.encode(prompt.parts)
        case TokenPrompt(token_ids):
            _check_tokens(prompt, card)
            return token_ids
        case TextPrompt():
            return _text_tokens(prompt, files)[0]


def echo_of(prompt: Prompt, files: ModelFiles) -> Echo | None:
    """Returns the echo of a tokenized prompt; None for a rendered conversation."""
    match prompt:
        case TextPrompt():
            return Echo(prompt.text, *_text_tokens(prompt, files))
        case TokenPrompt(token_ids):
            text, offsets = files.tokenizer.decode_with_offsets(token_ids)
            return Echo(text, token_ids, offsets)
    return None


def _text_tokens(prompt: TextPrompt, files: ModelFiles) -> tuple[list[int], list[int]]:
    add = prompt.add_special_tokens
    token_ids, offsets = files.tokenizer.encode_with_offsets(prompt.text, add_special_tokens=add)
    if not token_ids:
        raise InvalidRequest(f"{prompt.param}: a prompt must hold a token", param=prompt.param)
    return token_ids, offsets


def _check_tokens(prompt: TokenPrompt, card: ModelCard) -> None:
    if not prompt.token_ids:
        raise InvalidRequest(f"{prompt.param}: a prompt must hold a token", param=prompt.param)
    highest = max(prompt.token_ids)
    if highest >= card.vocab_size:
        raise InvalidRequest(
            f"{prompt.param}: {highest} is not in this model's vocabulary", param=prompt.param
        )

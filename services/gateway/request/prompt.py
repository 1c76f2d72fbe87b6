"""The prompt of a request: a conversation, a text, or tokens (as a list, or packed)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from services.gateway.images.input_image import InputImage
from services.gateway.text.decoding.detokenizer import decode_with_offsets
from services.gateway.text.decoding.token_table import TokenTable
from services.gateway.text.history.contents import num_chars, texts_of
from services.gateway.text.model_files import ModelFiles
from services.gateway.text.process_jobs import TokenizedImage
from shared.errors import InvalidRequest
from shared.messages import ModelCard
from shared.packing import TOKEN_ID_BYTES, unpack_token_ids

MESSAGE_CHARS = 32  # rendering cost of an empty message, in characters of text


class Echo(msgspec.Struct, frozen=True):
    """A prompt as it is returned to the client. `offsets`: the start of each token in `text`."""

    text: str
    token_ids: list[int]
    offsets: list[int]


MESSAGES = "messages"  # the field that errors of a rendering name


class ChatPrompt(msgspec.Struct, frozen=True):
    """`tools`, `variables`: the template's inputs besides the messages. `images`: those of the
    messages, in their order. `parts`: the rendered prompt.
    """

    messages: tuple[Mapping[str, Any], ...]
    parts: tuple[str, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    variables: Mapping[str, Any] = msgspec.field(default_factory=dict)
    param: str = MESSAGES  # the request field that holds them
    images: tuple[InputImage, ...] = ()

    @property
    def num_chars(self) -> int:
        """The characters that rendering and tokenizing cost; an empty message costs some, too."""
        tools = len(msgspec.json.encode(self.tools)) if self.tools else 0
        return tools + sum(map(_num_chars, self.messages))

    @property
    def num_calls(self) -> int:
        """Tool calls in the conversation."""
        return sum(len(message.get("tool_calls", ())) for message in self.messages)

    @property
    def min_chars(self) -> int:
        """The characters that are tokenized at least: templates strip text, and omit earlier
        reasoning.
        """
        sent = (each["content"] for each in self.messages if each["role"] != "assistant")
        return sum(len(text.strip()) for content in sent for text in texts_of(content))


@contextmanager
def naming_field_of(prompt: ChatPrompt) -> Iterator[None]:
    """Adds the field that the client sent to an error of the prompt's rendering."""
    try:
        yield
    except InvalidRequest as error:
        if error.param != MESSAGES:
            raise
        raise type(error)(error.message, param=prompt.param) from error


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


class PackedPrompt(msgspec.Struct, frozen=True):
    """A prompt that a preparation process tokenized. `tokens`: packed token ids."""

    tokens: bytes
    param: str
    is_chat: bool = False
    echo: Echo | None = None
    num_calls: int = 0  # tool calls in the conversation
    images: tuple[TokenizedImage, ...] = ()

    @property
    def num_chars(self) -> int:
        return len(self.tokens) // TOKEN_ID_BYTES


Prompt = ChatPrompt | TextPrompt | TokenPrompt | PackedPrompt


def _num_chars(message: Mapping[str, Any]) -> int:
    calls = message.get("tool_calls")
    count = MESSAGE_CHARS + num_chars(message["content"])
    count += len(message.get("reasoning_content", ""))
    return count + len(msgspec.json.encode(calls)) if calls else count


def min_tokens(prompt: Prompt, longest_token_chars: int | None) -> int:
    """Returns a lower bound of the prompt's tokens, without tokenizing it."""
    match prompt:
        case TokenPrompt() | PackedPrompt():
            return prompt.num_chars
        case ChatPrompt():
            num_chars = prompt.min_chars
        case TextPrompt():
            num_chars = prompt.num_chars
    return 0 if longest_token_chars is None else -(-num_chars // longest_token_chars)


def token_ids_of(prompt: TokenPrompt | PackedPrompt, card: ModelCard) -> list[int]:
    """Returns the prompt's tokens. Raises InvalidRequest for a prompt without tokens, or with a
    token that is not in the vocabulary.
    """
    if isinstance(prompt, PackedPrompt):
        token_ids = unpack_token_ids(prompt.tokens)
    else:
        token_ids = prompt.token_ids
    check_tokens(prompt, token_ids)
    highest = max(token_ids)
    if highest >= card.vocab_size:
        reason = f"{prompt.param}: {highest} is not in this model's vocabulary"
        raise InvalidRequest(reason, param=prompt.param)
    return token_ids


def encoded_prompt(prompt: Prompt, files: ModelFiles) -> list[int]:
    """Tokenizes the prompt in a preparation process. Raises InvalidRequest for a prompt without
    tokens.
    """
    match prompt:
        case ChatPrompt():
            token_ids = files.tokenizer.encode(prompt.parts)
        case TokenPrompt():
            token_ids = prompt.token_ids
        case PackedPrompt():
            token_ids = unpack_token_ids(prompt.tokens)
        case TextPrompt():
            add = prompt.add_special_tokens
            token_ids = files.tokenizer.encode_text(prompt.text, add_special_tokens=add)
    check_tokens(prompt, token_ids)
    return token_ids


def check_tokens(prompt: Prompt, token_ids: Sequence[int]) -> None:
    """Raises InvalidRequest for a prompt without tokens."""
    if not token_ids:
        is_chat = isinstance(prompt, ChatPrompt) or (
            isinstance(prompt, PackedPrompt) and prompt.is_chat
        )
        reason = "the model's chat template writes nothing for this conversation"
        reason = reason if is_chat else "a prompt must hold a token"
        raise InvalidRequest(f"{prompt.param}: {reason}", param=prompt.param)


def encoded_echo(prompt: Prompt, files: ModelFiles) -> Echo | None:
    """Converts the prompt to its echo in a preparation process; returns None for a conversation."""
    if isinstance(prompt, TextPrompt):
        add = prompt.add_special_tokens
        found = files.tokenizer.encode_with_offsets(prompt.text, add_special_tokens=add)
        return Echo(prompt.text, *found)
    return None if isinstance(prompt, ChatPrompt) else echo_of(prompt, files.tokens)


def echo_of(prompt: TokenPrompt | PackedPrompt, tokens: TokenTable) -> Echo | None:
    """Returns None for a rendered conversation."""
    if isinstance(prompt, PackedPrompt):
        return prompt.echo
    text, offsets = decode_with_offsets(tokens, prompt.token_ids)
    return Echo(text, prompt.token_ids, offsets)

"""Request and response bodies of `/tokenize` and `/detokenize`, in vLLM's shapes."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from services.gateway.dialects.openai.messages import ChatMessage, turns_of
from services.gateway.http.text_fields import TextFields
from services.gateway.request.conversation import chat_prompt
from services.gateway.request.prompt import ChatPrompt
from services.gateway.structured.tools.choice_fields import tool_options
from services.gateway.structured.tools.tool_fields import ToolFields
from shared.errors import InvalidRequest
from shared.messages import TokenId

# Fields that would change the tokens and are not supported, with the values that change nothing.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "chat_template": (None,),
    "continue_final_message": (None, False),
    "mm_processor_kwargs": (None, {}),
}


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt, or messages, to turn into tokens."""

    model: str | None = None
    """Name or alias of a model of `GET /v1/models`; by default the gateway's first model."""
    prompt: str | None = None
    """A text; either this or `messages`."""
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    """A conversation, which the model's chat template renders."""
    tools: ToolFields | None = None
    """The tools that the chat template writes into the prompt."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the model's chat template, such as `enable_thinking`."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens around a prompt; by default true."""
    add_generation_prompt: bool | None = None
    """Whether the start of an answer follows the messages; by default true."""
    return_token_strs: bool | None = None
    """Whether the response has the text of each token, too."""


class TokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    count: int
    """The number of tokens."""
    max_model_len: int
    """The context of the model in tokens; the prompt may be longer."""
    tokens: list[int]
    """The ids of the tokens."""
    token_strs: list[str] | None = None
    """The tokens as the vocabulary spells them, if they were asked for."""


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    """Name or alias of a model of `GET /v1/models`; by default the gateway's first model."""
    tokens: list[TokenId]
    """The tokens."""


class TokenizerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a client needs besides to prepare prompts itself; null: the tokenizer has none."""

    model: str
    """The name of the model."""
    bos_token: str | None = None
    """The token at the start of a text."""
    eos_token: str | None = None
    """The token at the end of a text."""
    pad_token: str | None = None
    """The token that fills up batches."""
    unk_token: str | None = None
    """The token for what the vocabulary lacks."""
    sep_token: str | None = None
    """The token between two texts."""
    cls_token: str | None = None
    """The token that stands for a whole text."""
    mask_token: str | None = None
    """The token that stands for a hidden one."""
    chat_template: str | None = None
    """The Jinja template of conversations."""
    model_max_length: int
    """The context of the model in tokens."""


class DetokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    prompt: str
    """The text of the tokens."""


TOKENIZE_FIELDS = TextFields(TokenizeRequest, NEUTRAL_VALUES)
DETOKENIZE_FIELDS = TextFields(DetokenizeRequest, {})


def check_tokenize(body: TokenizeRequest) -> None:
    """Raises InvalidRequest if fields contradict each other."""
    if body.prompt is None and body.messages is None:
        raise InvalidRequest("prompt: send a `prompt` or `messages`", param="prompt")
    if body.messages is None:
        for name in ("tools", "chat_template_kwargs"):
            if getattr(body, name):
                raise InvalidRequest(f"{name} is only allowed with `messages`", param=name)
    elif body.prompt is not None:
        raise InvalidRequest("messages: send either `prompt` or `messages`", param="messages")
    elif body.add_special_tokens:
        raise InvalidRequest(
            "add_special_tokens is only allowed with `prompt`: a chat template writes its own",
            param="add_special_tokens",
        )


def prompt_of(body: TokenizeRequest) -> ChatPrompt:
    """Returns the messages and tools for the chat template. Raises InvalidRequest and
    PayloadTooLarge.
    """
    turns, tools = turns_of(body.messages or []), tool_options(body.tools, None, None)
    return chat_prompt(turns, tools, variables=body.chat_template_kwargs)

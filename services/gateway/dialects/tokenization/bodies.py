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
    """Either `prompt` or `messages`. `add_special_tokens`: those that the tokenizer puts around a
    prompt, by default true; a chat template writes its own. `add_generation_prompt`: the start of
    an answer after the messages, by default true; without effect on a prompt.
    """

    model: str | None = None  # the gateway's only model
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    tools: ToolFields | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class TokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    """`max_model_len`: the model's context, in tokens; the prompt may be longer. `token_strs`: the
    tokens as the vocabulary spells them.
    """

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    tokens: list[TokenId]


class TokenizerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a client needs besides to prepare prompts itself; null: the tokenizer has none."""

    model: str
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    unk_token: str | None = None
    sep_token: str | None = None
    cls_token: str | None = None
    mask_token: str | None = None
    chat_template: str | None = None
    model_max_length: int


class DetokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    prompt: str


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

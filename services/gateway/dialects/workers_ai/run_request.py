"""The body of `ai/run`, and its meaning in Hearth's terms: one of five keys holds the prompts.

messages   a conversation
input      a conversation in the items of the Responses API, or a text
prompt     the message of a user; with `raw` a text without chat template
text       a text or texts to embed
query      what the texts of `contexts` are ranked by
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from services.gateway.dialects.ranking.pairs import (
    MAX_DOCUMENTS,
    PLACEHOLDER,
    Pairs,
    PairText,
    embedding_requests,
    requests_for_model,
)
from services.gateway.dialects.responses.fields import InputItem, leave_out_items
from services.gateway.dialects.responses.input import turns_of as turns_of_items
from services.gateway.dialects.workers_ai.errors import LoraNotSupported
from services.gateway.dialects.workers_ai.messages import RunMessage, turns_of
from services.gateway.http.text_fields import TextFields
from services.gateway.images.input_image import (
    image_of_base64,
    image_of_numbers,
    image_of_url,
)
from services.gateway.request.conversation import (
    Effort,
    ReasoningOptions,
    TextPart,
    Turn,
    chat_prompt,
)
from services.gateway.request.generation_request import GenerationRequest, with_model_pooling
from services.gateway.request.prompt import ChatPrompt, TextPrompt
from services.gateway.request.sampling import Limit, SamplingFields
from services.gateway.request.supported_fields import FOREIGN_FIELDS, HARMLESS_FIELDS
from services.gateway.structured.grammars.constraint_fields import constraint_of
from services.gateway.structured.tools.choice_fields import ToolChoiceField, tool_options
from services.gateway.structured.tools.tool import ToolOptions
from services.gateway.structured.tools.tool_fields import ToolFields
from services.gateway.text.model_files import ModelText
from shared.errors import InvalidRequest
from shared.messages import Pooling

DEFAULT_MAX_TOKENS = 256
DEFAULT_POOLING: Pooling = "mean"
MAX_TEXTS = 100
PROMPT_KEYS = ("messages", "input", "prompt", "text", "query")

# Keys that would change the output and that are not supported, with the values that change nothing.
# Any other unknown key is ignored, since clients send many.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    **{name: each for name, each in FOREIGN_FIELDS.items() if name != "thinking_token_budget"},
    "add_special_tokens": (None, True),
    "best_of": (None, 1),
    "echo": (None, False),
    "include_reasoning": (None, True),
    "image_b64": (None,),
    "input_text": (None,),
    "logprobs": (None, False),
    "max_completion_tokens": (None,),
    "max_length": (None,),
    "n": (None, 1),
    "request_id": (None,),
    "requests": (None, []),
    "source_lang": (None,),
    "suffix": (None, ""),
    "target_lang": (None,),
    "top_logprobs": (None, 0),
}
# Of OpenAI's dialect, and of the path. They change no answer.
HARMLESS = HARMLESS_FIELDS | {"cache_salt", "model", "priority", "prompt_cache_key"}


class RunOptions(msgspec.Struct, frozen=True, rename="camel"):
    reject_if_busy: bool | None = None
    """Answers 429 instead of waiting for room on a worker."""


class RankedContext(msgspec.Struct, frozen=True):
    text: str
    """The text to rank."""


Byte = Annotated[int, Meta(ge=0, le=255)]
EmbeddedText = str | Annotated[list[str], Meta(min_length=1, max_length=MAX_TEXTS)]


class RunRequest(SamplingFields, frozen=True, kw_only=True):
    """One of `messages`, `input`, `prompt`, `text`, or `query` with `contexts`; and options."""

    LIMITS: ClassVar[tuple[str, ...]] = (
        *SamplingFields.LIMITS,
        *("max_tokens", "thinking_token_budget"),
    )
    messages: Annotated[list[RunMessage], Meta(min_length=1)] | None = None
    """A conversation, which the model's chat template renders."""
    prompt: str | None = None
    """A text to answer; with `raw` to continue."""
    image: str | list[Byte] | None = None
    """An image that the last message of the user begins with: in base64, or its bytes as numbers.
    """
    raw: bool | None = None
    """Whether `prompt` goes to the model without the chat template."""
    input: str | list[InputItem] | None = None
    """A text, or items of the Responses API."""
    instructions: str | None = None
    """The system prompt beside `input`."""
    text: EmbeddedText | None = None
    """A text or texts to embed."""
    query: str | None = None
    """What `contexts` are ranked by."""
    contexts: (
        Annotated[list[RankedContext], Meta(min_length=1, max_length=MAX_DOCUMENTS)] | None
    ) = None
    """The texts to rank; `top_k` limits the results."""
    pooling: Pooling | None = None
    """Of `text`: the hidden state of the `last` token, or the `mean` of all."""
    normalize: bool | None = None
    """Of `text`: whether vectors have the length 1; by default true."""
    max_tokens: Limit | None = None
    """Most tokens of the output; by default 256."""
    stream: bool | None = None
    """Whether the response is sent as server-sent events while it is generated."""
    temperature: Annotated[float, Meta(ge=0, le=5)] | None = None
    """Scales the logits before sampling; 0: always the most likely token."""
    top_p: Annotated[float, Meta(ge=0, le=2)] | None = None
    """Samples from the most likely tokens whose probabilities add up to this; above 1 as 1."""
    lora: str | None = None
    """Refused: LoRA adapters are not supported."""
    tools: ToolFields | None = None
    """The tools that the model may call, as of chat completions or flat."""
    tool_choice: ToolChoiceField | None = None
    """Which tools the model may or must call: `auto`, `none`, `required`, one tool, or
    `allowed_tools`.
    """
    parallel_tool_calls: bool | None = None
    """Whether one answer may call several tools; by default true."""
    reasoning_effort: Effort | None = None
    """How much the model thinks, as its chat template understands it; `none` turns thinking off."""
    thinking_token_budget: Annotated[int, Meta(ge=0)] | None = None
    """Most tokens of thinking, after which the thinking is ended; at most `max_tokens`."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the model's chat template, such as `enable_thinking`."""
    options: RunOptions | None = None
    """How the request is queued."""

    @property
    def is_embedding(self) -> bool:
        return self.text is not None

    @property
    def pairs(self) -> Pairs | None:
        """Returns a query and its contexts, or None. Raises InvalidRequest."""
        if self.query is None:
            return None
        contexts = enumerate(self.contexts or ())
        texts = [PairText(each.text, f"contexts[{place}].text") for place, each in contexts]
        return Pairs([PairText(self.query, "query")], texts)

    @property
    def is_json(self) -> bool:
        """Whether the response is a JSON value rather than a text, as at Cloudflare."""
        return self.response_format is not None and self.response_format.type != "text"

    @property
    def is_streamed(self) -> bool:
        return bool(self.stream)

    @property
    def is_queueable(self) -> bool:
        return self.options is None or not self.options.reject_if_busy


RUN_FIELDS = TextFields(RunRequest, NEUTRAL_VALUES, HARMLESS, leave_out=leave_out_items)


def to_generation_requests(body: RunRequest, model: str) -> list[GenerationRequest]:
    """Returns one request for each text of an embedding, else one. Raises InvalidRequest if keys
    contradict each other, LoraNotSupported and PayloadTooLarge.
    """
    if body.lora:
        raise LoraNotSupported(f"the model {model!r} does not support LoRA", param="lora")
    _check_keys(body)
    if body.text is not None:
        return _embeddings(body, model)
    if (pairs := body.pairs) is not None:
        return embedding_requests(pairs, model, is_queueable=body.is_queueable)
    turns = _turns(body)
    tools = tool_options(body.tools, body.tool_choice, body.parallel_tool_calls)
    return [
        GenerationRequest(
            model=model,
            prompt=_prompt(body, turns, tools),
            sampling=_sampling(body),
            max_tokens=body.max_tokens,
            default_max_tokens=DEFAULT_MAX_TOKENS,
            output=constraint_of(body),
            is_queueable=body.is_queueable,
            tools=tools,
            reasoning=ReasoningOptions(
                effort=body.reasoning_effort,
                max_tokens=body.thinking_token_budget,
                max_tokens_param="thinking_token_budget",
            ),
        )
    ]


def for_model(
    body: RunRequest, generations: Sequence[GenerationRequest], files: ModelText
) -> Sequence[GenerationRequest]:
    """Returns the requests by which the model ranks contexts, if the body has some, or embeds
    texts. Raises InvalidRequest.
    """
    pairs = body.pairs
    if pairs is not None:
        return requests_for_model(pairs, generations, files)
    if not body.is_embedding or body.pooling is not None:
        return generations
    return with_model_pooling(generations, files.sentence_modules)


def without_prompts(body: RunRequest, count: int) -> RunRequest:
    """Returns the body with `count` empty prompts."""
    if body.text is not None:
        return msgspec.structs.replace(body, text="" if count == 1 else [""] * count)
    if body.query is not None:
        contexts = [RankedContext(PLACEHOLDER)] * len(body.contexts or ())
        return msgspec.structs.replace(body, query=PLACEHOLDER, contexts=contexts)
    if body.prompt is not None:
        return msgspec.structs.replace(body, prompt="")
    if body.input is not None:
        return msgspec.structs.replace(body, input="")
    short = [RunMessage(role="user", content="")]
    return msgspec.structs.replace(body, messages=short, image=None)


def _check_keys(body: RunRequest) -> None:
    given = [key for key in PROMPT_KEYS if getattr(body, key) is not None]
    if not given:
        raise InvalidRequest("the body needs one of messages, input, prompt, text and query")
    if len(given) > 1:
        raise InvalidRequest(f"{given[0]} and {given[1]} exclude each other", param=given[1])
    if body.raw and given != ["prompt"]:
        raise InvalidRequest("raw is for a prompt", param="raw")
    if body.instructions and given != ["input"]:
        raise InvalidRequest("instructions is for an input", param="instructions")
    _check_ranking(body)
    if body.image is not None and (given[0] not in ("messages", "prompt") or body.raw):
        raise InvalidRequest("image is for messages, or a prompt without raw", param="image")
    is_templated = given[0] in ("messages", "input", "prompt") and not body.raw
    for name in ("tools", "chat_template_kwargs", "thinking_token_budget"):
        if getattr(body, name) not in (None, [], {}) and not is_templated:
            raise InvalidRequest(f"{name} is for messages, or a prompt without raw", param=name)
    if body.stream and given[0] in ("text", "query"):
        raise InvalidRequest("embeddings and ranks are not streamed", param="stream")


def _check_ranking(body: RunRequest) -> None:
    if body.query is None:
        if body.contexts is not None:
            raise InvalidRequest("contexts are for a query", param="contexts")
    elif body.contexts is None:
        raise InvalidRequest("contexts: the texts that are ranked are missing", param="contexts")
    elif body.top_k is not None and body.top_k < 1:
        raise InvalidRequest("top_k: a rank has at least one result", param="top_k")


def _turns(body: RunRequest) -> tuple[Turn, ...]:
    """Builds the conversation from `messages`, `input`, or `prompt` (as one user message)."""
    if body.input is not None:
        given = body.input
        items = [InputItem(role="user", content=given)] if isinstance(given, str) else given
        return turns_of_items(body.instructions, (), items)
    if body.prompt is not None:
        return _with_image(body.image, (Turn("user", (TextPart(body.prompt),)),))
    return _with_image(body.image, turns_of(body.messages or ()))


def _with_image(image: str | list[int] | None, turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """Puts the image before the last text of the user. Raises InvalidRequest."""
    if image is None:
        return tuple(turns)
    of_user = [index for index, each in enumerate(turns) if each.role == "user"]
    if not of_user:
        raise InvalidRequest("image: there is no message of the user", param="image")
    if isinstance(image, list):
        part = image_of_numbers("image", image)
    elif ":" in image[:8]:  # a URL, of whatever scheme
        part = image_of_url("image", image)
    else:
        part = image_of_base64("image", image)
    last = of_user[-1]
    turn = turns[last]
    changed = msgspec.structs.replace(turn, parts=(part, *turn.parts))
    return (*turns[:last], changed, *turns[last + 1 :])


def _prompt(
    body: RunRequest, turns: Sequence[Turn], tools: ToolOptions | None
) -> ChatPrompt | TextPrompt:
    if body.raw and body.prompt is not None:
        return TextPrompt(body.prompt, "prompt")
    return chat_prompt(
        turns,
        tools,
        effort=body.reasoning_effort,
        variables=body.chat_template_kwargs,
        param="messages" if body.input is None else "input",
    )


def _sampling(body: RunRequest) -> SamplingFields:
    is_wide = body.top_p is not None and body.top_p > 1
    return msgspec.structs.replace(body, top_p=1.0) if is_wide else body


def _embeddings(body: RunRequest, model: str) -> list[GenerationRequest]:
    if isinstance(body.text, str):
        prompts = [TextPrompt(body.text, "text")]
    else:
        texts = enumerate(body.text or ())
        prompts = [TextPrompt(each, f"text[{index}]") for index, each in texts]
    return [
        GenerationRequest(
            model=model,
            prompt=prompt,
            sampling=SamplingFields(),
            max_tokens=1,
            pooling=body.pooling or DEFAULT_POOLING,
            shows_output=False,
            is_queueable=body.is_queueable,
        )
        for prompt in prompts
    ]

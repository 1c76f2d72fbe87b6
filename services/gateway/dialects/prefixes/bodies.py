"""Request and response bodies of `/v1/prefixes`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from services.gateway.dialects.openai.messages import ChatMessage, turns_of
from services.gateway.http.body import StrictBody
from services.gateway.request.conversation import chat_prompt
from services.gateway.request.prompt import ChatPrompt
from services.gateway.request.supported_fields import SupportedFields
from services.gateway.structured.tools.choice_fields import tool_options
from services.gateway.structured.tools.tool_fields import ToolFields
from shared.errors import InvalidRequest
from shared.messages import IndexState

MAX_TTL_S = 366 * 86_400


class PrefixRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The start of prompts, to compute ahead and to keep in caches."""

    model: str | None = None
    """Name or alias of a model of `GET /v1/models`; by default the gateway's first model."""
    system: str | None = None
    """The system prompt, before `messages`."""
    messages: list[ChatMessage] | None = None
    """The messages that the prefix begins with, as of chat completions, also with images."""
    tools: ToolFields | None = None
    """The tools that the prefix has, as of chat completions."""
    ttl_s: Annotated[int, Meta(ge=1, le=MAX_TTL_S)] | None = None
    """Seconds until the prefix is deleted; by default it remains."""
    cache_salt: str | None = None
    """Separates the cached prefixes of this request from the tenant's others."""


class WorkerPrefix(msgspec.Struct, frozen=True, kw_only=True):
    worker: str
    """The name of the worker."""
    cached_tokens: int
    """Tokens of the prompt, from its start, that the worker holds."""


class Prefix(msgspec.Struct, frozen=True, kw_only=True):
    """A named prefix and the workers that hold it."""

    object: Literal["prefix"] = "prefix"
    name: str
    """The name of the prefix."""
    model: str
    """The model that computes it."""
    is_public: bool
    """Whether all tenants use it."""
    num_tokens: int
    """Tokens of the prompt."""
    pinned_tokens: int
    """The tokens of full blocks, which a request can hit."""
    state: Literal["warm", "warming", "unknown"]
    """`warm`: all allowed workers hold it; `unknown`: the index does not reply."""
    reason: str | None
    """Why the prefix cannot become warm, if so."""
    workers: list[WorkerPrefix]
    """The workers that hold a part of it."""
    hits: int
    """Requests that used the prefix."""
    saved_tokens: int
    """Tokens that those requests did not compute."""
    bytes: int
    """Bytes of its KV in one worker's cache."""
    last_used_at: int | None
    """Seconds since 1970."""
    created_at: int
    """Seconds since 1970."""
    expires_at: int | None
    """Seconds since 1970; null: never."""
    messages: list[dict[str, Any]]
    """The messages without the names of participants; of an image, its place."""
    tools: list[dict[str, Any]]
    """The tools with the keys that templates expect."""


class PrefixEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the list; `GET /v1/prefixes/{name}` returns all fields."""

    object: Literal["prefix"] = "prefix"
    name: str
    """The name of the prefix."""
    model: str
    """The model that computes it."""
    is_public: bool
    """Whether all tenants use it."""
    num_tokens: int
    """Tokens of the prompt."""
    expires_at: int | None
    """Seconds since 1970; null: never."""


class PrefixList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[PrefixEntry]


class DeletedPrefix(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["prefix.deleted"] = "prefix.deleted"
    name: str
    """The name of the prefix."""
    deleted: bool = True
    """Always true."""


NULL = msgspec.Raw(b"null")


class DryRunRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Each field is a body of chat completions if it has `messages`, else of completions. They are
    decoded once, by the route of such a body. `other` may be null.
    """

    @property
    def named(self) -> list[tuple[str, msgspec.Raw]]:
        """Returns the bodies with the names of their fields."""
        other = [] if bytes(self.other) == bytes(NULL) else [("other", self.other)]
        return [("request", self.request), *other]

    request: msgspec.Raw
    """A body of chat completions if it has `messages`, else of completions."""
    other: msgspec.Raw = msgspec.field(default_factory=lambda: NULL)
    """Another such body, to find the token at which the two prompts diverge; may be null."""


class DryRun(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a prompt that would not be computed."""

    prompt_tokens: int
    cached_tokens: int
    """Length of the longest cached prefix of the prompt on any worker."""
    public_tokens: int
    """Length of the public prefix that the prompt begins with."""
    index_state: IndexState | Literal["unknown"]
    """Whether the index of caches is complete."""
    workers: list[WorkerPrefix]
    """The workers that hold a part of the prompt."""


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """The first place at which two prompts differ."""

    token_index: int
    """The first token that differs, from 0."""
    common_blocks: int
    """Full blocks that both prompts share."""
    text_before: str
    """The text right before that token."""
    request_text: str | None
    """The text of `request` from that token on; null if its prompt ended."""
    other_text: str | None
    """The text of `other` from that token on; null if its prompt ended."""


class DryRunReport(msgspec.Struct, frozen=True, kw_only=True):
    """What would be cached, and where two prompts diverge."""

    object: Literal["prefix.dry_run"] = "prefix.dry_run"
    request: DryRun
    """What a worker holds of the first prompt."""
    other: DryRun | None = None
    """What a worker holds of the second one; null without it."""
    divergence: Divergence | None = None
    """Null for equal prompts and for a single prompt."""


class PrefixBody(StrictBody):
    fields = SupportedFields(PrefixRequest, {})


class DryRunBody(StrictBody):
    fields = SupportedFields(DryRunRequest, {})


def prompt_of(body: PrefixRequest) -> ChatPrompt:
    """Returns the prompt of a prefix. Raises InvalidRequest for an empty conversation, and
    PayloadTooLarge.
    """
    system = [] if body.system is None else [ChatMessage(role="system", content=body.system)]
    turns = turns_of([*system, *(body.messages or [])])
    if not turns:
        raise InvalidRequest("a prefix needs `system` or `messages`", param="system")
    return chat_prompt(turns, tool_options(body.tools, None, None))

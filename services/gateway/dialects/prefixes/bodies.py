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
    """`system` precedes `messages`; `tools` as in chat completions. Without `ttl_s` the prefix
    remains until it is deleted.
    """

    model: str | None = None  # default: the gateway's own model
    system: str | None = None
    messages: list[ChatMessage] | None = None
    tools: ToolFields | None = None
    ttl_s: Annotated[int, Meta(ge=1, le=MAX_TTL_S)] | None = None
    cache_salt: str | None = None


class WorkerPrefix(msgspec.Struct, frozen=True, kw_only=True):
    worker: str
    cached_tokens: int


class Prefix(msgspec.Struct, frozen=True, kw_only=True):
    """`pinned_tokens`: the tokens of full blocks, which a request can hit. `state`: `warm` if all
    allowed workers hold them, `warming`, or `unknown` if the index does not reply; `reason`: why it
    cannot become warm, if so. `messages` have
    no names of participants, and `tools` the keys that templates expect.
    """

    object: Literal["prefix"] = "prefix"
    name: str
    model: str
    is_public: bool
    num_tokens: int
    pinned_tokens: int
    state: Literal["warm", "warming", "unknown"]
    reason: str | None
    workers: list[WorkerPrefix]
    hits: int
    saved_tokens: int
    bytes: int
    last_used_at: int | None
    created_at: int
    expires_at: int | None
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]


class PrefixEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the list; `GET /v1/prefixes/{name}` returns all fields."""

    object: Literal["prefix"] = "prefix"
    name: str
    model: str
    is_public: bool
    num_tokens: int
    expires_at: int | None


class PrefixList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[PrefixEntry]


class DeletedPrefix(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["prefix.deleted"] = "prefix.deleted"
    name: str
    deleted: bool = True


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
    other: msgspec.Raw = msgspec.field(default_factory=lambda: NULL)


class DryRun(msgspec.Struct, frozen=True, kw_only=True):
    """`cached_tokens`: length of the longest cached prefix of the prompt on any worker."""

    prompt_tokens: int
    cached_tokens: int
    public_tokens: int
    index_state: IndexState | Literal["unknown"]
    workers: list[WorkerPrefix]


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """The first token at which two prompts differ, from 0. A text is null if its prompt ended."""

    token_index: int
    common_blocks: int
    text_before: str
    request_text: str | None
    other_text: str | None


class DryRunReport(msgspec.Struct, frozen=True, kw_only=True):
    """`divergence` is null for equal prompts and for a single prompt."""

    object: Literal["prefix.dry_run"] = "prefix.dry_run"
    request: DryRun
    other: DryRun | None = None
    divergence: Divergence | None = None


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

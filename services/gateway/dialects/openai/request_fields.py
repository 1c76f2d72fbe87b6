"""The fields that OpenAI's chat and text completions share, with what vLLM adds to them."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from services.gateway.request.sampling import MAX_INT, SamplingFields
from services.gateway.request.supported_fields import FOREIGN_FIELDS
from shared.errors import InvalidRequest

MAX_CHOICES = 128
MAX_CACHE_KEY_CHARS = 256

# Fields that would change the output and that Hearth does not support, with the values that change
# nothing. Any other unknown field is ignored, since clients send many.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {**FOREIGN_FIELDS, "options": (None, {})}

NumChoices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    include_usage: bool | None = None
    """Whether the stream ends with an event that has `usage` and `hearth`."""
    continuous_usage_stats: bool | None = None
    """With `include_usage`: whether each event has the usage so far."""


class RequestFields(SamplingFields, frozen=True, kw_only=True):
    model: str | None = None
    """Name or alias of a model of `GET /v1/models`; by default the gateway's first model."""
    stream: bool | None = None
    """Whether the response is sent as server-sent events while it is generated."""
    stream_options: StreamOptions | None = None
    """What the events of a stream have besides; only with `stream`."""
    n: NumChoices | None = None
    """How many choices are generated for each prompt."""
    best_of: NumChoices | None = None
    """How many choices are generated, of which the `n` most likely are returned."""
    user: str | None = None
    """Accepted for compatibility; it has no effect."""
    cache_salt: str | None = None
    """Separates the cached prefixes of this request from the tenant's others."""
    prompt_cache_key: Annotated[str, Meta(max_length=MAX_CACHE_KEY_CHARS)] | None = None
    """Requests with the same key prefer the worker that served the last of them, whose cache has
    their prefix.
    """
    priority: Annotated[int, Meta(ge=-MAX_INT, le=MAX_INT)] | None = None
    """Higher goes first; a request can lower its tenant's priority, not raise it."""

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def has_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def has_running_usage(self) -> bool:
        options = self.stream_options
        return self.has_usage and options is not None and bool(options.continuous_usage_stats)


def check_stream_options(body: RequestFields) -> None:
    """Raises InvalidRequest for stream options of a request that is not streamed."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest(
            "stream_options is only allowed when stream is true", param="stream_options"
        )

"""Searches the models of a tenant: `ai/models/search`, `ai/tasks/search`, `ai/authors/search`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Literal, TypeVar
from uuid import NAMESPACE_URL, uuid5

import msgspec
from msgspec import Meta

from services.gateway.dialects.workers_ai.envelope import ResultInfo, Success
from shared.errors import InvalidRequest
from shared.messages import ModelCard

T = TypeVar("T")
DEFAULT_PER_PAGE = 50
MAX_PER_PAGE = 1000
MAX_PAGE = 2**31 - 1
MAX_SEARCH_CHARS = 256
SOURCE = 1  # every model comes from an inference server
NATIVE_AUTHOR = "hearth"  # the author of a name that has none


class Task(msgspec.Struct, frozen=True):
    id: str
    name: str
    description: str


class Property(msgspec.Struct, frozen=True):
    property_id: str
    value: str


class WorkersAIModel(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str
    description: str
    task: Task
    properties: Sequence[Property]
    tags: Sequence[str] = ()
    source: int = SOURCE


class Author(msgspec.Struct, frozen=True):
    id: str
    name: str


SearchText = Annotated[str, Meta(max_length=MAX_SEARCH_CHARS)]


class SearchQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of a search. No model is experimental or deprecated."""

    search: SearchText = ""
    """A text that the name or the description has."""
    task: SearchText = ""
    """The name or the id of a task."""
    author: SearchText = ""
    """The name of an author."""
    source: int | None = None
    """The number of a source; every model has 1."""
    page: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = 1
    """The page, from 1."""
    per_page: Annotated[int, Meta(ge=1, le=MAX_PER_PAGE)] = DEFAULT_PER_PAGE
    """Most results of a page, from 1 to 1000; by default 50."""
    hide_experimental: bool = False
    include_deprecated: bool = False
    format: Literal["default"] = "default"


def _id(kind: str, name: str) -> str:
    """Returns an id that is the same on every gateway."""
    return str(uuid5(NAMESPACE_URL, f"{kind}:{name}"))


TEXT_GENERATION = Task(
    _id("task", "Text Generation"),
    "Text Generation",
    "Models that continue a text or a conversation.",
)


def search_query(params: Mapping[str, str]) -> SearchQuery:
    """Returns the parameters. Raises InvalidRequest, which names the wrong one."""
    try:
        return msgspec.convert(dict(params), SearchQuery, strict=False)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).rpartition(" - at `$.")
        name = place.rstrip("`")
        raise InvalidRequest(f"{name}: {problem}", param=name) from error


def model_rows(card: ModelCard, names: Iterable[str]) -> list[WorkersAIModel]:
    """Returns one row for each name of the model."""
    properties = (Property("context_window", str(card.max_context_tokens)),)
    return [
        WorkersAIModel(
            id=_id("model", name),
            name=name,
            description=f"{card.name}, revision {card.revision}",
            task=TEXT_GENERATION,
            properties=properties,
        )
        for name in names
    ]


def search_models(rows: Sequence[WorkersAIModel], query: SearchQuery) -> Success:
    return _page([row for row in rows if _is_match(row, query)], query)


def search_tasks(rows: Sequence[WorkersAIModel], query: SearchQuery) -> Success:
    return _page(list(dict.fromkeys(row.task for row in rows)), query)


def search_authors(rows: Sequence[WorkersAIModel], query: SearchQuery) -> Success:
    names = dict.fromkeys(author_of(row.name) for row in rows)
    return _page([Author(_id("author", name), name) for name in names], query)


def author_of(name: str) -> str:
    """Returns the second part of `@cf/author/name`, or the first of `author/name`."""
    parts = name.split("/")
    if name.startswith("@"):
        parts = parts[1:]
    return parts[0] if len(parts) > 1 else NATIVE_AUTHOR


def _is_match(row: WorkersAIModel, query: SearchQuery) -> bool:
    return (
        _holds(f"{row.name}\n{row.description}", query.search)
        and query.task.casefold() in ("", row.task.name.casefold(), row.task.id)
        and query.author.casefold() in ("", author_of(row.name).casefold())
        and query.source in (None, row.source)
    )


def _holds(text: str, searched: str) -> bool:
    return searched.casefold() in text.casefold()


def _page(rows: Sequence[T], query: SearchQuery) -> Success:
    start = (query.page - 1) * query.per_page
    shown = rows[start : start + query.per_page]
    info = ResultInfo(len(shown), query.page, query.per_page, len(rows))
    return Success(result=shown, result_info=info)

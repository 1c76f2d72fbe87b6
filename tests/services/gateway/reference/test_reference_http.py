"""`/openapi.json` and `/docs` of a gateway explain each request, and stay true."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import msgspec
import pytest

from services.gateway.dialects.dialect_table import DIALECTS
from services.gateway.reference.page import FOLDER
from services.gateway.request.endpoint import Endpoint, GeneratingEndpoint
from tests.services.gateway.conftest import Cluster

MAX_BYTES = 60 << 10  # of our own files
VOID = {"meta", "link", "br"}


async def document_of(cluster: Cluster) -> dict[str, Any]:
    document: dict[str, Any] = (await cluster.http.get("/openapi.json")).json()
    return document


def names_in(value: Any) -> Iterator[str]:
    """The names of the types that a part of the document refers to."""
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"].rpartition("/")[2]
        value = list(value.values())
    for each in value if isinstance(value, list) else ():
        yield from names_in(each)


def operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        yield from ((f"{method} {path}", each) for method, each in methods.items())


async def test_every_property_is_described(cluster: Cluster) -> None:
    schemas = (await document_of(cluster))["components"]["schemas"]
    missing = [
        f"{name}.{field}"
        for name, each in sorted(schemas.items())
        for field, schema in each.get("properties", {}).items()
        if not schema.get("description")
    ]
    assert len(schemas) > 150
    assert missing == []


async def test_every_operation_is_described(cluster: Cluster) -> None:
    document = await document_of(cluster)
    tags = [each["name"] for each in document["tags"]]
    for name, each in operations(document):
        assert " " in each["summary"], name  # not the name of the handler, which Litestar takes
        assert {*each["tags"]} <= {*tags}, name
        texts = [*each.get("parameters", ()), *each["responses"].values()]
        assert all(one["description"] for one in texts), name
    assert {*names_in(document)} <= document["components"]["schemas"].keys()


@pytest.mark.parametrize(
    "endpoint",
    [each for dialect in DIALECTS for each in dialect.endpoints if each.example is not None],
    ids=lambda each: each.name,
)
def test_example_is_valid(endpoint: Endpoint) -> None:
    body = msgspec.json.encode(endpoint.example)
    if isinstance(endpoint, GeneratingEndpoint):
        decoded = endpoint.fields.decode(body)
        assert endpoint.generations(decoded, "m")
    else:
        assert msgspec.json.decode(body, type=endpoint.request)


class Page(HTMLParser):
    """Checks that elements are closed in order; collects ids and links."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: Counter[str] = Counter()
        self.links: set[str] = set()
        self.tags: set[str] = set()
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.add(tag)
        self.ids.update({given["id"] or ""} if "id" in given else ())
        self.links |= {given[name] or "" for name in ("href", "src") if name in given}
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, self.getpos()


async def test_page_is_valid_and_its_links_work(cluster: Cluster) -> None:
    response = await cluster.http.get("/docs")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    page = Page(response.text)
    assert page.open == []
    assert not page.tags & {"script", "img", "iframe", "form"}
    assert max(page.ids.values()) == 1
    for link in page.links:
        if link.startswith("#"):
            assert link[1:] in page.ids, link
        else:
            assert (await cluster.http.get(link)).status_code == 200, link
    document = await document_of(cluster)
    for name, each in operations(document):
        assert name.startswith("head ") or each["summary"] in response.text, name


async def test_page_allows_its_own_style_alone(cluster: Cluster) -> None:
    headers = (await cluster.http.get("/docs")).headers
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert "script-src" not in policy


def test_own_files_are_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir() if path.is_file()) <= MAX_BYTES

"""Renders the reference page from the OpenAPI document: HTML and CSS alone, in one file."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from markupsafe import Markup

from services.gateway.reference.error_meanings import ErrorRow
from services.gateway.reference.schema_text import coded, limits_text, name_of, type_text

FOLDER = Path(__file__).parent
METHODS = ("post", "put", "get", "delete")


class ApiOperation(msgspec.Struct, frozen=True, kw_only=True):
    """An operation of the document. `paths`: all that have it, the shortest name first."""

    method: str
    paths: tuple[str, ...]
    anchor: str
    body: Mapping[str, Any]
    request_type: str | None
    example: str


class OperationGroup(msgspec.Struct, frozen=True):
    """The operations of a dialect."""

    title: str
    about: str
    anchor: str
    operations: list[ApiOperation]


def rendered_page(document: dict[str, Any], errors: Sequence[ErrorRow]) -> bytes:
    """Returns the page as UTF-8."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"coded": coded, "type": type_text, "limits": limits_text}
    groups = list(groups_of(document))
    text = environment.get_template("reference.html").render(
        info=document["info"],
        groups=groups,
        body_types=_body_types(groups),
        schemas=document["components"]["schemas"],
        errors=errors,
        style=Markup(_style()),
    )
    return text.encode()


def _body_types(groups: Sequence[OperationGroup]) -> dict[str, str]:
    """Returns the operation, by its anchor, that shows the fields of each type of a body."""
    found: dict[str, str] = {}
    for group in groups:
        for each in group.operations:
            if each.request_type is not None:
                found.setdefault(each.request_type, each.anchor)
    return found


@cache
def page_headers() -> dict[str, str]:
    """Returns the headers of the page, whose policy allows its own style and nothing else."""
    digest = base64.b64encode(hashlib.sha256(_style().encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    )
    return {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }


@cache
def _style() -> str:
    return (FOLDER / "reference.css").read_text()


def groups_of(document: dict[str, Any]) -> Iterator[OperationGroup]:
    """Yields the groups in the order of the document's tags."""
    by_tag: dict[str, dict[tuple[str, str], list[str]]] = {}
    for path, methods in document["paths"].items():
        for method in METHODS:
            if method in methods:
                [tag] = methods[method]["tags"]
                key = (method, methods[method]["summary"])
                by_tag.setdefault(tag, {}).setdefault(key, []).append(path)
    for each in document["tags"]:
        found = by_tag.get(each["name"], {})
        operations = [_operation(document, *key, paths) for key, paths in found.items()]
        operations.sort(key=lambda one: (one.method != "POST", one.paths[0], one.method != "PUT"))
        yield OperationGroup(
            each["name"], each["description"], f"group-{_slug(each['name'])}", operations
        )


def _operation(
    document: dict[str, Any], method: str, summary: str, paths: list[str]
) -> ApiOperation:
    paths.sort(key=lambda path: ("/accounts/" in path, not path.startswith("/v1"), path))
    body = document["paths"][paths[0]][method]
    content = body.get("requestBody", {}).get("content", {}).get("application/json", {})
    reference = content.get("schema", {}).get("$ref")
    return ApiOperation(
        method=method.upper(),
        paths=tuple(paths),
        anchor=f"{method}-{_slug(paths[0])}",
        body=body,
        request_type=name_of(reference) if reference else None,
        example=_example(method.upper(), paths[0], body, content.get("example")),
    )


def _example(method: str, path: str, body: Mapping[str, Any], example: Any) -> str:
    """Returns a command that sends the request."""
    lines = [
        f'curl "$URL{path}"' if method in ("GET", "POST") else f'curl -X {method} "$URL{path}"'
    ]
    if body.get("security"):
        lines.append('  -H "Authorization: Bearer $KEY"')
    if example is not None:
        lines.append("  -H 'Content-Type: application/json'")
        lines.append(f"  -d '{json.dumps(example, indent=2)}'".replace("\n", "\n  "))
    return " \\\n".join(lines)


def _slug(text: str) -> str:
    return "-".join("".join(each if each.isalnum() else " " for each in text.lower()).split())

"""JSON bodies for a schema: valid, but for values of any kind, size and depth in their places."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg

from services.gateway.dialects.dialect_table import DIALECTS
from services.gateway.dialects.workers_ai.run_request import RunRequest
from services.gateway.nats_api.endpoints import api_endpoints
from shared.subjects import api_request

# What `json.dumps` cannot write, in place of a text that it can.
_RAW = {
    "@1e400": "1e400",
    "@-1e400": "-1e400",
    "@1e-400": "1e-400",
    "@8.0": "8.0",
    "@1e3": "1e3",
    "@-0": "-0",
    "@deep 33": "[" * 33 + "]" * 33,
    "@deep 500": '{"a":' * 500 + "1" + "}" * 500,
    "@deep 9000": "[" * 9000 + "]" * 9000,
    "@open 20000": "[" * 20_000,
    "@wide": "[" + "0," * 150_000 + "0]",  # decoded in a preparation process
    "@long": '"' + "x" * 300_000 + '"',
    "@twice": '{"type":"text","type":7,"type":null,"text":"a","text":[]}',
    "@bytes": '"\x7f\u2028\ufffe"',
    "@half": '"\\ud83d"',
}
VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2**31,
        2**53 + 1,
        2**63,
        2**64,
        -(2**63) - 1,
        10**400,
        -(10**25),
    ),
    *(0.5, -0.0, 1e308, -1e308, 5e-324, float("nan"), float("inf")),
    *(
        "",
        " ",
        "\0",
        "a\0b",
        "\ud800",
        "x\udfff",
        "😀",
        "x" * 300,
        "y" * 20_000,
        "nan",
        "-1",
        "1e9",
    ),
    *([], [[]], [None], [0] * 2000, [""] * 300, ["\0"], [{}], [[[1.5]]]),
    *({}, {"": {}}, {"\0": 1}, {"k" * 5000: "v"}, {"\ud800": "\ud800"}, {"type": None}),
    *({"type": "text", "text": "a"}, {"type": "unknown_kind"}, {"type": "function", "name": "f"}),
    *({"$ref": "#"}, {"type": "object", "properties": {"a": {"maximum": 10**30}}}),
    *_RAW,
)
# What a decoder of any value accepts, and what is behind it may not.
HARD: tuple[Any, ...] = (2**64, -(10**400), "@1e400", "@deep 33", "\0", [0] * 20_000)
MAX_DEPTH = 6


class Bodies:
    """`root`: the document that references point into. `known`: values of fields, by their names:
    without a model that is served, messages and short outputs, most bodies would test little.
    `num_hard`: how many of HARD each field gets, in turns.
    """

    def __init__(
        self, root: dict[str, Any], known: dict[str, Any], num_hard: int = len(HARD)
    ) -> None:
        self._root = root
        self._known = known
        self._num_hard = num_hard
        self._turns = itertools.cycle(HARD)

    def of(self, schema: dict[str, Any], count: int, seed: str) -> Iterator[bytes]:
        """The same ones for each seed. First some of HARD in each place where any value may be;
        then `count` others, of which a third is valid, and a tenth is no object.
        """
        choose = random.Random(seed)
        fields = self._resolved(schema).get("properties", {})
        for name in filter(lambda each: self._reaches_any(fields[each]), fields if count else ()):
            for value in itertools.islice(self._turns, self._num_hard):
                body = self._object(schema, choose, 0, wanted={name})
                yield encoded({**body, name: self._with_any(fields[name], value, choose)}, choose)
        for _ in range(count):
            kind = choose.random()
            body = self.valid(schema, choose) if kind < 0.9 else choose.choice(VALUES)
            if 0.33 < kind < 0.9:
                for _ in range(choose.choice((1, 1, 1, 2, 4))):
                    body = _spoiled(body, choose)
            yield encoded(body, choose)

    def valid(self, schema: dict[str, Any], choose: random.Random, depth: int = 0) -> Any:
        schema = self._resolved(schema)
        kinds = schema.get("oneOf") or schema.get("anyOf")
        if kinds:
            bounds = {each: schema[each] for each in ("minimum", "maximum") if each in schema}
            return self.valid({**bounds, **self._resolved(choose.choice(kinds))}, choose, depth)
        if "enum" in schema:
            return choose.choice(schema["enum"])
        if "const" in schema:
            return schema["const"]
        match schema.get("type"):
            case "object":
                return self._object(schema, choose, depth)
            case "array":
                items = schema.get("items") or {}
                count = 0 if depth > MAX_DEPTH else choose.choice((1, 1, 2))
                return [self.valid(items, choose, depth + 1) for _ in range(count)]
            case "string":
                return choose.choice(("hello", "a", "f", "{}"))
            case "integer" | "number" as kind:
                least, most = schema.get("minimum", 0), schema.get("maximum", 9)
                number = min(max(choose.choice((0, 1, 3)), least), most)
                return int(number) if kind == "integer" else number
            case "boolean":
                return choose.random() < 0.5
            case "null":
                return None
        return choose.choice(VALUES)

    def _object(
        self,
        schema: dict[str, Any],
        choose: random.Random,
        depth: int,
        wanted: set[str] | None = None,
    ) -> dict[str, Any]:
        schema = self._resolved(schema)
        fields, required = schema.get("properties", {}), schema.get("required", [])
        if not fields:
            return {choose.choice(("a", "type", "\0", "enable_thinking")): choose.choice(VALUES)}
        if wanted is None:
            wanted = {each for each in fields if choose.random() < 1.5 / len(fields)}
        names = [each for each in fields if each in required or each in wanted]
        known = self._known.keys() & fields.keys() - names
        known -= {"input"} if "messages" in fields else set()
        names += [each for each in sorted(known) if choose.random() < 0.8]
        return {
            each: self._known[each]
            if each in self._known and choose.random() < 0.9
            else self.valid(fields[each], choose, depth + 1)
            for each in names
        }

    def _with_any(self, schema: dict[str, Any], value: Any, choose: random.Random) -> Any:
        """A valid value of the schema, with this one wherever any may be."""
        schema = self._resolved(schema)
        if _is_any(schema):
            return {"x": value}
        kinds = schema.get("oneOf") or schema.get("anyOf")
        if kinds:
            return self._with_any(next(filter(self._reaches_any, kinds)), value, choose)
        if schema.get("type") == "array":
            return [self._with_any(schema["items"], value, choose)]
        fields = schema.get("properties", {})
        reaching = {each for each in fields if self._reaches_any(fields[each])}
        made = self._object(schema, choose, 1, wanted=reaching)
        return made | {each: self._with_any(fields[each], value, choose) for each in reaching}

    def _reaches_any(self, schema: dict[str, Any], depth: int = 0) -> bool:
        schema = self._resolved(schema)
        below = [
            *(schema.get("oneOf") or schema.get("anyOf") or ()),
            *schema.get("properties", {}).values(),
            *([schema["items"]] if "items" in schema else ()),
        ]
        return depth < MAX_DEPTH and (
            _is_any(schema) or any(self._reaches_any(each, depth + 1) for each in below)
        )

    def _resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        while "$ref" in schema:
            found: Any = self._root
            for part in schema["$ref"].removeprefix("#/").split("/"):
                found = found[part]
            schema = found
        return schema


def _is_any(schema: dict[str, Any]) -> bool:
    """Whether any value, or any object, may be there."""
    is_open = not schema.keys() & {"oneOf", "anyOf", "enum", "const", "properties", "items"}
    return is_open and schema.get("type", "object") == "object"


def encoded(value: Any, choose: random.Random) -> bytes:
    """With fields that occur twice, in a tenth of the objects."""
    text = json.dumps(value)
    if isinstance(value, dict) and value and choose.random() < 0.1:
        name = choose.choice(list(value))
        text = f"{{{json.dumps(name)}: {json.dumps(choose.choice(VALUES))}, {text[1:]}"
    for name, raw in _RAW.items():
        text = text.replace(f'"{name}"', raw)
    return text.encode()


def _spoiled(value: Any, choose: random.Random) -> Any:
    """Replaces the value of a random place, or adds a field to an object."""
    if isinstance(value, dict) and value and choose.random() < 0.8:
        name = choose.choice(list(value))
        return {**value, name: _spoiled(value[name], choose)}
    if isinstance(value, list) and value and len(value) < 10 and choose.random() < 0.8:
        place = choose.randrange(len(value))
        return [*value[:place], _spoiled(value[place], choose), *value[place + 1 :]]
    if isinstance(value, dict) and choose.random() < 0.3:
        return {**value, choose.choice(("x", "\0", "type", "k" * 3000)): choose.choice(VALUES)}
    return choose.choice(VALUES)


# ── requests ─────────────────────────────────────────────────────────────────────────────────────

PATH_VALUES = ("%00", "%ff", "..%2f..", "a" * 3000, "%F0%9F%98%80", "-1", "a%0d%0ab", "*", ">")
QUERIES = (
    "",
    "?limit=1",
    "?limit=99999999999999999999&after=%00",
    "?order=\u2028&limit=-1",
    "?x[]",
)
BODY_METHODS = ("post", "put")


@dataclass(frozen=True)
class AnyRequest:
    """`place`: the route, or the subject's endpoint."""

    place: str
    method: str
    path: str
    body: bytes


def http_requests(
    document: dict[str, Any],
    routes: Iterable[tuple[str, str]],
    *,
    model: str,
    tenant: str,
    count: int,
    seed: int,
    num_hard: int = len(HARD),
) -> Iterator[AnyRequest]:
    """`count` of each of the routes, each a method and a path as the OpenAPI document has it; a
    quarter of those without a body, or under an account.
    """
    choose = random.Random(seed)
    run = msgspec.json.schema_components([RunRequest], ref_template="#/components/schemas/{name}")
    schemas = {**document["components"]["schemas"], **run[1]}
    bodies = Bodies({"components": {"schemas": schemas}}, _known(model), num_hard)
    for method, path in routes:
        operation = document["paths"].get(path, {}).get(method, {})
        content = operation.get("requestBody", {}).get("content", {})
        schema = content.get("application/json", {}).get("schema")
        if schema is None:
            schema = run[0][0] if "/ai/run" in path else {"type": "object"}
        is_full = method in BODY_METHODS and "{account}" not in path
        for body in bodies.of(schema, count if is_full else count // 4, f"{seed} {method} {path}"):
            filled = _filled(path, model, tenant, choose) + choose.choice(QUERIES)
            has_body = method in BODY_METHODS
            yield AnyRequest(f"{method} {path}", method, filled, body if has_body else b"")


def nats_requests(
    model: str, *, count: int, seed: int, num_hard: int = len(HARD)
) -> Iterator[AnyRequest]:
    """`count` for each endpoint that the discovery of services describes."""
    for name, api in api_endpoints(DIALECTS).items():
        schema = json.loads(api.info.metadata["request_schema"])
        for body in Bodies(schema, _known(model), num_hard).of(schema, count, f"{seed} {name}"):
            yield AnyRequest(name, "nats", name, body)


def _known(model: str) -> dict[str, Any]:
    lengths = ("max_tokens", "max_output_tokens", "max_completion_tokens")
    message = {"role": "user", "content": "hello"}
    return {
        "model": model,
        "messages": [message],
        "input": "hello",
        "request": {"model": model, "messages": [message]},
        "role": "user",
        "content": "hello",
        "tokens": [5],
        **dict.fromkeys(lengths, 4),
    }


def _filled(path: str, model: str, tenant: str, choose: random.Random) -> str:
    values = {"account": tenant, "model": model, "model_id": model}
    return re.sub(
        r"\{(\w+)\}",
        lambda found: (
            choose.choice(PATH_VALUES)
            if choose.random() < 0.1
            else values.get(found[1], choose.choice(("a", "b", "resp_1")))
        ),
        path,
    )


def statuses_of(seen: dict[str, Counter[int]]) -> str:
    """One line for each place."""
    return "\n".join(f"{place}: {dict(sorted(each.items()))}" for place, each in seen.items())


async def nats_status(connection: Client, client_id: str, request: AnyRequest) -> int:
    """The status of the last reply; 200 without an error."""
    received: asyncio.Queue[Msg] = asyncio.Queue()
    inbox = connection.new_inbox()
    subscription = await connection.subscribe(inbox, cb=received.put)
    try:
        subject = api_request(request.path, client_id)
        await connection.publish(subject, request.body, reply=inbox)
        while True:
            reply = await asyncio.wait_for(received.get(), timeout=60)
            fields = reply.headers or {}
            if "Nats-Service-Error-Code" in fields:
                return int(fields["Nats-Service-Error-Code"])
            if "Hearth-End" in fields or not reply.data.endswith(b"\n"):  # a body, no event
                return 200
    finally:
        await subscription.unsubscribe()

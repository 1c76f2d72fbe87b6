"""The commands of operators, newest last, in a bounded stream of Redis. No secrets.

hearth:audit    stream: who, command, arguments (JSON), outcome; the id is the time
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from shared.store import Store

AUDIT = "hearth:audit"
MAX_LINES = 10_000
MAX_VALUE_CHARS = 200
_SECRET = re.compile(r"(^|_)(url|token|secret|password|credential)$")
_USER_INFO = re.compile(r"//[^/@\s]*@")
_READ = "return redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', ARGV[1])"


class AuditLine(msgspec.Struct, frozen=True, kw_only=True):
    """A command of an operator. `at` is in seconds of Redis's clock. `outcome` is done, or the code
    of the error.
    """

    at: float
    who: str
    command: str
    arguments: str
    outcome: str


def shown_arguments(given: Mapping[str, Any], changes: Mapping[str, Any]) -> str:
    """Returns a command's arguments as JSON, without URLs and secrets.

    Of `given`, None and False are omitted: they are options that were not given. Of `changes`, all
    values are included, because zero, None and False are limits.
    """
    shown = {name: each for name, each in given.items() if each is not None and each is not False}
    shown |= changes
    found = {name: _shown(shown[name]) for name in sorted(shown) if not _SECRET.search(name)}
    return msgspec.json.encode(found).decode()


def _shown(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    return _USER_INFO.sub("//…@", str(value))[:MAX_VALUE_CHARS]


async def record(store: Store, *, who: str, command: str, arguments: str, outcome: str) -> None:
    """Appends a record to the audit log. Raises StoreUnavailable."""
    fields = ("who", who, "command", command, "arguments", arguments, "outcome", outcome)
    await store.write([("XADD", AUDIT, "MAXLEN", "~", MAX_LINES, "*", *fields)])


async def newest(store: Store, count: int) -> list[AuditLine]:
    """Returns the newest lines, at most `count`, oldest first. Raises StoreUnavailable."""
    found = await store.evaluate(_READ, [AUDIT], [count])
    return [_line(line_id, fields) for line_id, fields in reversed(found)]


def _line(line_id: bytes, fields: list[bytes]) -> AuditLine:
    texts = [each.decode(errors="replace") for each in fields]
    named = dict(zip(texts[::2], texts[1::2], strict=False))
    return AuditLine(
        at=int(line_id.partition(b"-")[0]) / 1000,
        **{name: named.get(name, "") for name in ("who", "command", "arguments", "outcome")},
    )

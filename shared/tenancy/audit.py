"""The audit log, in bounded streams of Redis, newest last: commands of operators, deletions of
tenants' data, and refusals. No secrets, and no text of clients.

    hearth:audit             stream: kind, who, command, arguments, outcome; of operators alone
    hearth:audit:deletions   the same of processes
    hearth:audit:refusals    the same of processes: no number of refusals pushes another line out

The id of a line is its time. Arguments are JSON.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from itertools import chain
from typing import Any, Literal, cast, get_args

import msgspec

from shared.store import Command, Store

AUDIT = "hearth:audit"
MAX_LINES = 10_000
MAX_VALUE_CHARS = 200
_SECRET = re.compile(r"(^|_)(url|token|secret|password|credential)$")
_USER_INFO = re.compile(r"//[^/@\s]*@")
_API_KEY = re.compile(r"hearth-[\w-]{32}")  # given in place of its id
AuditKind = Literal["command", "deletion", "refusal"]
AUDIT_KINDS: tuple[AuditKind, ...] = get_args(AuditKind)
STREAMS: dict[AuditKind, str] = {
    "command": AUDIT,
    "deletion": f"{AUDIT}:deletions",
    "refusal": f"{AUDIT}:refusals",
}
_READ = "return redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', ARGV[1])"


class AuditLine(msgspec.Struct, frozen=True, kw_only=True):
    """A command of an operator, a deletion or a refusal. `at` is in seconds of Redis's clock. `who`
    is a user, or a process. `outcome` is done, or the code of the error.
    """

    at: float
    kind: AuditKind = "command"
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
    text = _API_KEY.sub("hearth-…", _USER_INFO.sub("//…@", str(value)))
    return text[:MAX_VALUE_CHARS]


async def record(
    store: Store,
    *,
    who: str,
    command: str,
    arguments: str,
    outcome: str,
    kind: AuditKind = "command",
) -> None:
    """Appends a record to the audit log. Raises StoreUnavailable."""
    await store.write([line_command(who, command, arguments, outcome, kind)])


def line_command(
    who: str, command: str, arguments: str, outcome: str, kind: AuditKind = "command"
) -> Command:
    """Returns the command of Redis that appends a record."""
    named = {"who": who, "command": command, "arguments": arguments, "outcome": outcome}
    fields = chain(("kind", kind), *named.items())
    return ("XADD", STREAMS[kind], "MAXLEN", "~", MAX_LINES, "*", *fields)


async def newest(
    store: Store, count: int, kinds: Collection[AuditKind] = AUDIT_KINDS
) -> list[AuditLine]:
    """Returns the newest lines of these kinds, at most `count`, oldest first. Raises
    StoreUnavailable.
    """
    found = [await store.evaluate(_READ, [STREAMS[each]], [count]) for each in kinds]
    lines = [_line(line_id, fields) for line_id, fields in chain(*found)]
    return sorted(lines, key=lambda each: each.at)[-count:]


def _line(line_id: bytes, fields: list[bytes]) -> AuditLine:
    texts = [each.decode(errors="replace") for each in fields]
    named = dict(zip(texts[::2], texts[1::2], strict=False))
    kind = named.get("kind", "command")  # an earlier release wrote none
    return AuditLine(
        at=int(line_id.partition(b"-")[0]) / 1000,
        kind=cast(AuditKind, kind) if kind in AUDIT_KINDS else "command",
        **{name: named.get(name, "") for name in ("who", "command", "arguments", "outcome")},
    )

"""Reads one line of a log: JSON or text of Hearth's processes, lines of nats-server and Redis."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from services.local.processes.log_files import is_redis_notice
from shared.config import LOG_LEVELS
from shared.telemetry.log_text import text_of

_TEXT = re.compile(r"(\d{4}-\d\d-\d\d) (\d\d:\d\d:\d\d\.\d{3})Z (debug|info|warning|error) ")
_NATS = re.compile(r"\[\d+\] (\d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d+) \[(\w{3})\] +(.*)")
_REDIS = re.compile(r"\d+:[A-Z] (\d\d \w{3} \d{4} \d\d:\d\d:\d\d\.\d{3}) ([.\-*#]) (.*)")
_REDIS_SIGNAL = re.compile(r"\d+:signal-handler \((\d+)\) (.*)")
_NATS_LEVELS = {"TRC": "debug", "DBG": "debug", "WRN": "warning", "ERR": "error", "FTL": "error"}
_REDIS_LEVELS = {".": "debug", "-": "debug", "#": "warning"}  # else it is "info"
_NATS_TIME, _REDIS_TIME = "%Y/%m/%d %H:%M:%S.%f", "%d %b %Y %H:%M:%S.%f"
_decode = msgspec.json.Decoder(dict[str, Any]).decode


class LogLine(msgspec.Struct, frozen=True):
    """A line, its time in seconds since 1970, and its event; the event of other lines than JSON is
    their text.
    """

    unix_s: float
    process: str
    raw: str
    event: Mapping[str, Any]
    is_json: bool = False

    @property
    def level(self) -> str:
        return str(self.event.get("level", "info"))

    def has_level(self, least: str) -> bool:
        """Whether the line has the level or a higher one. Unknown levels are the highest."""
        given = LOG_LEVELS.index(self.level) if self.level in LOG_LEVELS else len(LOG_LEVELS)
        return given >= LOG_LEVELS.index(least)

    def text(self, *, has_colors: bool) -> str:
        return text_of(self.event, has_colors=has_colors)

    def json(self) -> str:
        """Returns the line as it was written, or JSON of what was not."""
        return self.raw if self.is_json else msgspec.json.encode(self.event).decode()


def parse_line(raw: str, process: str, before_s: float) -> LogLine:
    """Reads a line of the log of `process`. A line without a time has that of the line before."""
    if raw.startswith("{"):
        try:
            event = _decode(raw)
        except msgspec.MsgspecError:
            return _other(raw, process, before_s)
        event.setdefault("process", process)
        unix_s = _unix_s(str(event.get("timestamp", "")), before_s)
        return LogLine(unix_s, process, raw, event, is_json=True)
    return _server_line(raw, process) or _other(raw, process, before_s)


def _server_line(raw: str, process: str) -> LogLine | None:
    """Returns the line of a server, which has the time of this machine's time zone."""
    if found := _NATS.fullmatch(raw):
        at, level = found[1], _NATS_LEVELS.get(found[2], "info")
        return _line(datetime.strptime(at, _NATS_TIME), process, raw, level, found[3])
    if found := _REDIS.fullmatch(raw):
        at, text = found[1], found[3]
        level = "info" if is_redis_notice(text) else _REDIS_LEVELS.get(found[2], "info")
        return _line(datetime.strptime(at, _REDIS_TIME), process, raw, level, text)
    if found := _REDIS_SIGNAL.fullmatch(raw):
        at_signal = datetime.fromtimestamp(int(found[1]), UTC)
        return _line(at_signal, process, raw, "info", found[2])
    return None


def _other(raw: str, process: str, before_s: float) -> LogLine:
    """Returns a line in text. What a process prints beside its log is its last words, or output of
    libraries: worth a look.
    """
    if found := _TEXT.match(raw):
        rest = raw[found.end() :].strip().removeprefix(f"{process} ")
        at = datetime.fromisoformat(f"{found[1]}T{found[2]}+00:00")
        return _line(at, process, raw, found[3], rest)
    is_last = raw.startswith((f"{process}: ", "hearth: "))
    at = datetime.fromtimestamp(before_s, UTC)
    return _line(at, process, raw, "error" if is_last else "warning", raw)


def _line(at: datetime, process: str, raw: str, level: str, text: str) -> LogLine:
    timestamp = at.astimezone(UTC).isoformat().replace("+00:00", "Z")
    event = {"timestamp": timestamp, "level": level, "event": text, "process": process}
    return LogLine(at.timestamp(), process, raw, event)


def _unix_s(timestamp: str, before_s: float) -> float:
    try:
        return datetime.fromisoformat(timestamp).timestamp()
    except ValueError:
        return before_s

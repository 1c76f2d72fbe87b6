"""Structured logs on standard error: by default text on a terminal, JSON lines elsewhere.

No call raises or blocks: see `telemetry.line_writer`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
import structlog

from shared.telemetry.line_writer import LineWriter
from shared.telemetry.log_text import FIRST_KEYS, text_of

LEVEL_VARIABLE, FORMAT_VARIABLE = "HEARTH_LOG_LEVEL", "HEARTH_LOG_FORMAT"
# asyncio says it of each end of a TLS connection that it reads as a stream
EOF_OF_TLS = "returning true from eof_received() has no effect when using ssl"
_encode = msgspec.json.Encoder().encode


def configure_service_logging(process_id: str, *, level: str, log_format: str) -> None:
    """Configures the logs of a service, and of the processes that it starts."""
    os.environ[LEVEL_VARIABLE], os.environ[FORMAT_VARIABLE] = level, log_format
    configure_logging(process_id, level=level, log_format=log_format)


def configure_child_logging(process_id: str) -> None:
    """Configures logs as those of the service that has started this process."""
    configure_logging(
        process_id,
        level=os.environ.get(LEVEL_VARIABLE, "info"),
        log_format=os.environ.get(FORMAT_VARIABLE, "auto"),
    )


def configure_logging(process_id: str, *, level: str = "info", log_format: str = "auto") -> None:
    """Adds the process id to every line. Prompts and tokens are never logged.

    `level` and `log_format` are among LOG_LEVELS and LOG_FORMATS of `shared.config`.
    """
    fd = _error_fd()
    is_text = log_format == "text" or (log_format == "auto" and os.isatty(fd))
    renderer: structlog.typing.Processor = (
        _text_renderer(has_colors=os.isatty(fd) and not os.environ.get("NO_COLOR"))
        if is_text
        else structlog.processors.JSONRenderer(serializer=json_line)
    )
    chain = (
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        _in_order,
        renderer,
    )

    def report(num_dropped: int) -> bytes:
        event = {"event": "log_lines_dropped", "num_lines": num_dropped, "process": process_id}
        return _line_of(_rendered(chain, None, "warning", event))

    writer = LineWriter(fd, report=report)
    structlog.configure(
        processors=[lambda *call: _rendered(chain, *call)],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=lambda *_: LineLogger(writer),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(process=process_id)
    if not any(isinstance(each, LibraryLogs) for each in logging.getLogger().handlers):
        logging.getLogger().addHandler(LibraryLogs(logging.WARNING))


class LibraryLogs(logging.Handler):
    """Logs what libraries say at warning or worse, which would stand as text among the lines. No
    odd message raises in the library.
    """

    def emit(self, record: logging.LogRecord) -> None:
        message = _message_of(record)
        if EOF_OF_TLS not in message:
            # some libraries have levels of their own
            level = min(record.levelno // 10 * 10, logging.CRITICAL)
            structlog.get_logger().log(
                level,
                "library_message",
                library=record.name,
                message=message,
                exc_info=record.exc_info,
            )


def _message_of(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # its arguments do not fit
        return f"{record.msg!r} {record.args!r}"


def _text_renderer(*, has_colors: bool) -> structlog.typing.Processor:
    return lambda logger, method, event: text_of(event, has_colors=has_colors)


def _in_order(logger: Any, method: str, event: Any) -> Any:
    """Returns the event with the keys first by which people look for lines."""
    return {key: event[key] for key in FIRST_KEYS if key in event} | event


class LineLogger:
    """Writes rendered lines for structlog."""

    def __init__(self, writer: LineWriter) -> None:
        self._writer = writer

    def msg(self, line: str) -> None:
        self._writer.write(_line_of(line))

    debug = info = warning = warn = error = critical = fatal = exception = log = msg


def _error_fd() -> int:
    """Returns the descriptor of standard error, or of a new /dev/null if that is closed
    or no file.
    """
    try:
        return sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        return os.open(os.devnull, os.O_WRONLY)


def _line_of(line: str) -> bytes:
    return f"{line}\n".encode(errors="backslashreplace")


def _rendered(
    chain: tuple[structlog.typing.Processor, ...], logger: Any, method: str, event: Any
) -> Any:
    """Returns the line. A value that cannot be rendered costs its line, not its caller."""
    name = event.get("event")
    try:
        for processor in chain:
            event = processor(logger, method, event)
        return event
    except Exception as error:
        failed = {
            "timestamp": datetime.now(UTC).isoformat().replace("+00:00", "Z"),
            "level": "error",
            "event": "log_line_failed",
            "of": str(name),
            "error": type(error).__name__,
        }
        return json.dumps(failed)


def json_line(event: dict[str, Any], default: Callable[[Any], Any]) -> str:
    """Returns the event as one line of JSON, in a third of the time of `json.dumps`.

    `default` converts values that JSON cannot represent.
    """
    try:
        return msgspec.json.format(_encode(event), indent=0).decode()
    except (TypeError, ValueError):  # a lone surrogate raises, too
        return json.dumps(event, default=default)

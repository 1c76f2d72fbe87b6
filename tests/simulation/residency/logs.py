"""The log lines of a run: counted, searched, and written to a file, which is searched as well."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import structlog

from tests.simulation.simulation import Journal

INFO = 20


class SearchedLog(Journal):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.on_line: Callable[[str, bytes], None] = lambda event, line: None
        self._file = path.open("wb")

    def take(self, logger: Any, method: str, event: MutableMapping[str, Any]) -> Any:
        line = msgspec.json.encode(dict(event), enc_hook=repr)
        self._file.write(line + b"\n")
        self.on_line(str(event["event"]), line)
        return super().take(logger, method, event)

    def close(self) -> None:
        self._file.close()


@contextmanager
def searched_log(path: Path) -> Iterator[SearchedLog]:
    before, logs = structlog.get_config(), SearchedLog(path)
    structlog.configure(
        processors=[structlog.processors.format_exc_info, logs.take],
        wrapper_class=structlog.make_filtering_bound_logger(INFO),
        cache_logger_on_first_use=False,
    )
    try:
        yield logs
    finally:
        structlog.configure(**before)
        logs.close()

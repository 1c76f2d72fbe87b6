"""Stores what a host knows of its models, so that a restart asks no worker.

<state folder>/lock                 held by the running host
<state folder>/models/<key>.json    a ModelRecord
<state folder>/logs/                of its workers
"""

from __future__ import annotations

import fcntl
import hashlib
from pathlib import Path
from typing import IO

import msgspec
import structlog

from services.host.budget import ModelKey
from services.local.state import write_secret
from services.local.state_home import state_home
from shared.errors import ConfigError
from shared.messages import ModelCard
from shared.transport.wire_errors import UNREADABLE, one_line

log = structlog.get_logger(__name__)


class ModelRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The last measurement of a model on this host, and its model card.

    `start_s` is the time of a start from cold, `wake_s` that from standby. `process_bytes` is the
    memory of a worker besides weights and KV.
    """

    key: tuple[str, str]
    source: str
    max_context_tokens: int
    card: ModelCard
    process_bytes: int
    start_s: float
    wake_s: float


def default_state_dir(process_id: str) -> Path:
    """Returns the folder of a host's records. Raises ConfigError."""
    return state_home() / "hearth" / "hosts" / process_id.partition(".")[0]


class Records:
    def __init__(self, directory: Path) -> None:
        """Raises ConfigError if the folder cannot be used, or another host uses it."""
        self.directory = directory
        self._models = directory / "models"
        try:
            self._models.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock: IO[str] = (directory / "lock").open("a")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"state_dir {directory} is used by another host") from None
        except OSError as error:
            raise ConfigError(f"state_dir {directory}: {error.strerror}") from None

    def read(self, key: ModelKey, *, source: str, max_context_tokens: int) -> ModelRecord | None:
        """Returns None for a record of another source or context."""
        path = self._path(key)
        try:
            found = msgspec.json.decode(path.read_bytes(), type=ModelRecord)
        except FileNotFoundError:
            return None
        except (OSError, *UNREADABLE) as error:
            log.warning("record_unreadable", path=str(path), error=one_line(error))
            return None
        is_same = (found.source, found.max_context_tokens) == (source, max_context_tokens)
        return found if is_same and ModelKey(*found.key) == key else None

    def write(self, record: ModelRecord) -> None:
        text = msgspec.json.format(msgspec.json.encode(record)).decode()
        try:
            write_secret(self._path(ModelKey(*record.key)), text)
        except ConfigError as error:
            log.warning("record_not_written", model=record.key[0], error=error.message)

    def close(self) -> None:
        self._lock.close()

    def _path(self, key: ModelKey) -> Path:
        digest = hashlib.sha256("\0".join(key).encode()).hexdigest()[:16]
        return self._models / f"{digest}.json"

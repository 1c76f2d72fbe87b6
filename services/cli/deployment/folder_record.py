"""What a folder of secrets is for: its processes, the host of Redis, the certificates of NATS.

A later call names what is new alone. Without the record every process that it leaves out would lose
its place in nats.conf.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from shared.errors import ConfigError

FILE = "deployment.json"


class FolderRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`processes` are ROLE=NAME[@REGION], `has_defaults` adds those of the deployment files. None:
    never given.
    """

    has_defaults: bool
    processes: tuple[str, ...] = ()
    redis_host: str | None = None
    tls: str | None = None

    def with_given(
        self, processes: Sequence[str], *, redis_host: str | None, tls: str | None
    ) -> FolderRecord:
        """Returns a record with further processes, of which one replaces that of its name, and with
        the other options where they are given.
        """
        return FolderRecord(
            has_defaults=self.has_defaults,
            processes=_joined(self.processes, processes),
            redis_host=self.redis_host if redis_host is None else redis_host,
            tls=self.tls if tls is None else tls,
        )

    def all_processes(self, defaults: Sequence[str]) -> tuple[str, ...]:
        return _joined(defaults if self.has_defaults else (), self.processes)


def read_record(folder: Path) -> FolderRecord | None:
    """Returns None for a folder that has none yet. Raises ConfigError."""
    path = folder / FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=FolderRecord)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def _joined(earlier: Sequence[str], later: Sequence[str]) -> tuple[str, ...]:
    names = {_name_of(each) for each in later}
    return (*(each for each in earlier if _name_of(each) not in names), *later)


def _name_of(process: str) -> str:
    return process.partition("=")[2].partition("@")[0]

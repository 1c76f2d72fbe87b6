"""Options whose values are in files: HEARTH_<OPTION>_FILE names the file of HEARTH_<OPTION>.

So a secret is in no environment that others see, such as that of `docker inspect`, and an operator
replaces it while the process runs: `shared/secrets/secret.py` has those that are read again.
"""

from __future__ import annotations

from collections.abc import Collection, MutableMapping
from pathlib import Path

import structlog

from shared.clock import Clock
from shared.errors import ConfigError

log = structlog.get_logger(__name__)

POLL_S = 1.0
_BEGIN, _END = "HEARTH_", "_FILE"
Signature = tuple[int, int, int] | None  # inode, size, time of change; None without a file


class OptionFile:
    """The file of one option. `text` is without the line's end. Raises ConfigError if it cannot be
    read at first.
    """

    def __init__(self, variable: str, path: Path) -> None:
        """`variable`: of the environment, which names the file."""
        self.path = path
        self._variable = variable
        self._signature = file_signature(path)
        self.text = self._read()

    def poll(self) -> None:
        """Reads the file again if it has changed. If it cannot be used, the earlier text stays."""
        signature = file_signature(self.path)
        if signature == self._signature:
            return
        self._signature = signature  # an unusable file is logged once
        try:
            text = self._read()
        except ConfigError as error:
            log.warning("option_file_unusable", reason=error.message)
            return
        if text != self.text:
            self.text = text
            log.info("option_file_read", file=str(self.path))

    def _read(self) -> str:
        """Raises ConfigError."""
        try:
            text = self.path.read_text().strip()
        except OSError as error:
            raise ConfigError(f"{self._variable} {self.path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{self._variable} {self.path} is not text") from None
        if not text:
            raise ConfigError(f"{self._variable} {self.path} is empty")
        return text


async def poll_files(files: Collection[OptionFile], clock: Clock) -> None:
    """Polls all files until it is cancelled."""
    while True:
        await clock.sleep(POLL_S)
        for each in files:
            each.poll()


def file_signature(path: Path) -> Signature:
    """Returns what differs once the file is another one, or has been written again."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def read_option_files(environ: MutableMapping[str, str]) -> dict[str, OptionFile]:
    """Replaces each HEARTH_<OPTION>_FILE by HEARTH_<OPTION> with the text of that file. Returns the
    files by the names of the options, such as `nats_url`. An empty name is ignored. Raises
    ConfigError.
    """
    found = {}
    names = [each for each in environ if each.startswith(_BEGIN) and each.endswith(_END)]
    for name in names:
        path, variable = environ.pop(name), name.removesuffix(_END)
        if not path:
            continue
        if environ.get(variable):
            raise ConfigError(f"{variable} and {name} are both set: one of them is enough")
        file = OptionFile(name, Path(path))
        environ[variable] = file.text
        found[variable.removeprefix(_BEGIN).lower()] = file
    return found

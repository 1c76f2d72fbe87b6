"""The files with which a process connects to NATS, which an operator replaces while it runs.

They are read again when the connection is lost, and while it cannot be made: a process goes on with
the new ones, without a restart. Half a replacement, such as a certificate without its key, is
unreadable: the earlier files stay in use until the other half is there.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from shared.tls import TlsFiles
from shared.transport.nkeys import API_KEY, UserKey

Signature = tuple[tuple[int, int, int] | None, ...]  # inode, size, time of change


@dataclass(frozen=True, slots=True)
class ConnectionCredential:
    tls: ssl.SSLContext | None
    key: UserKey | None


class CredentialFiles:
    """`seed_file`: of the process's key; None: it has a password. `tls`: None without TLS. With
    `to_clients` the key is that of a gateway in the account of the API clients.
    """

    def __init__(self, seed_file: Path | None, tls: TlsFiles | None, *, to_clients: bool) -> None:
        self._seed_file = seed_file
        self._tls = tls
        self._to_clients = to_clients
        self._signature: Signature = ()

    def read(self) -> ConnectionCredential:
        """Raises ConfigError."""
        self._signature = self._present()
        key = None if self._seed_file is None else UserKey.of_file(self._seed_file)
        if self._to_clients and key is not None:
            key = key.derived(API_KEY)
        return ConnectionCredential(None if self._tls is None else self._tls.context(), key)

    def read_changed(self) -> ConnectionCredential | None:
        """Returns None if the files are those that were read last. Raises ConfigError, once for the
        same files.
        """
        return None if self._present() == self._signature else self.read()

    def _present(self) -> Signature:
        tls = TlsFiles() if self._tls is None else self._tls
        named = (self._seed_file, *filter(None, (tls.ca, tls.cert, tls.key)))
        return tuple(_signature(Path(each)) for each in named if each is not None)


def _signature(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns

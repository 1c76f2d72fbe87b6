"""The files with which a process connects to NATS, which an operator replaces while it runs: the
seed of its key, those of TLS, and the URL where it has the password.

They are read again when the connection is lost, and while it cannot be made: a process goes on with
the new ones, without a restart. Half a replacement, such as a certificate without its key, is
unreadable: the earlier files stay in use until the other half is there.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from shared.errors import ConfigError
from shared.nats_urls import NatsServers, nats_servers
from shared.secrets.option_files import Signature, file_signature
from shared.tls import TlsFiles
from shared.transport.nkeys import API_KEY, UserKey


@dataclass(frozen=True, slots=True)
class ConnectionCredential:
    tls: ssl.SSLContext | None
    key: UserKey | None
    password: str | None = None


class CredentialFiles:
    """`servers`: as the process was started. `tls`: None without TLS. `url_file`: of the URL; None:
    it is not in a file. With `to_clients` the key is that of a gateway in the account of the API
    clients.
    """

    def __init__(
        self,
        servers: NatsServers,
        tls: TlsFiles | None,
        *,
        url_file: Path | None = None,
        to_clients: bool = False,
    ) -> None:
        self._servers = servers
        self._tls = tls
        self._url_file = url_file
        self._to_clients = to_clients
        self._signature: tuple[Signature, ...] = ()

    def read(self) -> ConnectionCredential:
        """Raises ConfigError."""
        self._signature = self._present()
        seed_file = self._servers.seed_file
        key = None if seed_file is None else UserKey.of_file(seed_file)
        if self._to_clients and key is not None:
            key = key.derived(API_KEY)
        tls = None if self._tls is None else self._tls.context()
        return ConnectionCredential(tls, key, self._password())

    def _password(self) -> str | None:
        """Raises ConfigError, also for the URL of another credential: the process keeps its id."""
        if self._url_file is None or self._servers.user is None:
            return self._servers.password
        try:
            found = nats_servers(self._url_file.read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"nats_url: cannot read {self._url_file}: {error}") from None
        if found.user != self._servers.user:
            raise ConfigError(f"nats_url: {self._url_file} is not of {self._servers.user}")
        return found.password

    def read_changed(self) -> ConnectionCredential | None:
        """Returns None if the files are those that were read last. Raises ConfigError, once for the
        same files.
        """
        return None if self._present() == self._signature else self.read()

    def _present(self) -> tuple[Signature, ...]:
        tls = TlsFiles() if self._tls is None else self._tls
        named = (
            self._servers.seed_file,
            self._url_file,
            *filter(None, (tls.ca, tls.cert, tls.key)),
        )
        return tuple(file_signature(Path(each)) for each in named if each is not None)

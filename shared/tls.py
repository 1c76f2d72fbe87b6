"""Files of TLS: which authorities to trust, and the own certificate."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from shared.errors import ConfigError


class TlsFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Paths of PEM files; an empty `ca` stands for the authorities of the system."""

    ca: str = ""
    cert: str = ""  # includes its chain; set if the server requires certificates of its clients
    key: str = ""

    @classmethod
    def of_environ(cls, server: str, environ: Mapping[str, str]) -> TlsFiles:
        """Reads the files of a server, "NATS" or "REDIS", from the environment. Commands use it."""
        names = ("ca", "cert", "key")
        return cls(**{each: environ.get(f"HEARTH_{server}_{each.upper()}", "") for each in names})

    def problems(self, name: str) -> Iterator[str]:
        """Yields errors of the options, whose names begin with `name`."""
        for part, path in (("ca", self.ca), ("cert", self.cert), ("key", self.key)):
            if path and not Path(path).is_file():
                yield f"{name}_{part} {path} is not a file"
        if bool(self.cert) != bool(self.key):
            yield f"{name}_cert and {name}_key must be given together"

    def context(self) -> ssl.SSLContext:
        """Verifies the server's certificate and name. Raises ConfigError for an unreadable file."""
        try:
            context = ssl.create_default_context(cafile=self.ca or None)
            if self.cert:
                context.load_cert_chain(self.cert, self.key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"cannot read the files for TLS: {error}") from error
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        return context

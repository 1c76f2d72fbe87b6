"""Holds the certificate of an HTTPS server, and loads it again when its files change."""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from pathlib import Path

import structlog

from shared.clock import Clock
from shared.errors import ConfigError
from shared.tls import certificate_ends_at

log = structlog.get_logger(__name__)

POLL_S = 10.0


class Certificate:
    def __init__(self, cert: str, key: str) -> None:
        """`cert` is a PEM file of the certificate and its chain, `key` one of its key. Raises
        ConfigError if they cannot be read or do not match.
        """
        self._files = cert, key
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._changed_at = _changed_at(self._files)
        try:
            self.context.load_cert_chain(cert, key, password=_no_password)
        except (OSError, ssl.SSLError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"cannot use http_cert {cert} with http_key {key}: {reason}"
            ) from error
        self.expires_at = certificate_ends_at(cert)  # seconds since 1970

    async def watch(self, clock: Clock) -> None:
        """Polls the files until it is cancelled. Open connections keep the certificate of their
        handshake.
        """
        while True:
            await clock.sleep(POLL_S)
            self.poll()

    def poll(self) -> None:
        """Loads changed files. Unusable files, for example if only one of them has been replaced,
        are tried again; until then the last certificate stays in use.
        """
        changed_at = _changed_at(self._files)
        if changed_at == self._changed_at:
            return
        try:
            # A separate context: a failure must not leave `context` with only one of the files.
            trial = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            trial.load_cert_chain(*self._files, password=_no_password)
            self.context.load_cert_chain(*self._files, password=_no_password)
        except (OSError, ssl.SSLError) as error:
            log.error("certificate_not_loaded", files=self._files, error=str(error))
            return
        self._changed_at = changed_at
        self.expires_at = certificate_ends_at(self._files[0])
        log.info("certificate_loaded", files=self._files)


def _no_password() -> str:
    """Returns no password for an encrypted key: OpenSSL would ask for it on the terminal."""
    return ""


def _changed_at(paths: Iterable[str]) -> list[int]:
    """Returns the modification times in nanoseconds; 0 for a missing file."""
    found = []
    for path in map(Path, paths):
        try:
            found.append(path.stat().st_mtime_ns)
        except OSError:
            found.append(0)
    return found

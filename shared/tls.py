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


def pinned_context(certificate: str) -> ssl.SSLContext:
    """Returns what accepts a server with the certificate of this PEM file alone, at any address.
    Raises ConfigError.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the authority may be unknown here
    try:
        context.load_verify_locations(cafile=certificate)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"cannot read the certificate {certificate}: {error}") from error
    return context


def certificate_ends_at(certificate: str) -> float:
    """Returns the end of a PEM file's first certificate, in seconds since 1970. Raises
    ConfigError.
    """
    from cryptography import x509  # as below

    try:
        found = x509.load_pem_x509_certificate(Path(certificate).read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the certificate {certificate}: {error}") from None
    return found.not_valid_after_utc.timestamp()


def certificate_names(certificate: str) -> tuple[str, ...]:
    """Returns the addresses and host names of a PEM file's first certificate. Raises
    ConfigError.
    """
    from cryptography import x509  # 0.03 s, which most processes do not need

    try:
        found = x509.load_pem_x509_certificate(Path(certificate).read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the certificate {certificate}: {error}") from None
    try:
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    addresses = (str(each) for each in names.get_values_for_type(x509.IPAddress))
    return (*addresses, *names.get_values_for_type(x509.DNSName))

"""What ends, or fills up, on the machine of a process. The thread that collects reads it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shared.errors import ConfigError
from shared.tls import TlsFiles, certificate_ends_at


class MachineCollector(Collector):
    def __init__(
        self,
        tls: TlsFiles,
        folders: Iterable[Path] | None = None,
        server_ends_at: Callable[[], float | None] = lambda: None,
    ) -> None:
        """`tls` are the files for NATS; `folders` (default: those that all processes write to) say
        which disks. `server_ends_at` returns the end of the certificate that nats-server has shown.
        """
        self._tls = tls
        self._folders = written_folders(os.environ) if folders is None else tuple(folders)
        self._server_ends_at = server_ends_at

    def collect(self) -> Iterator[Metric]:
        free = GaugeMetricFamily(
            "hearth_disk_free_ratio",
            "Free share of the disk of a folder that the process writes to.",
            labels=["folder"],
        )
        for folder in self._folders:
            if (share := free_share(folder)) is not None:
                free.add_metric([str(folder)], share)
        ends = GaugeMetricFamily(
            "hearth_nats_certificate_expiry_timestamp_seconds",
            "End of a certificate of NATS, in seconds since 1970; of: server, own, authority.",
            labels=["of"],
        )
        for of, ends_at in self._certificates():
            if ends_at is not None:
                ends.add_metric([of], ends_at)
        yield from (free, ends)

    def _certificates(self) -> Iterator[tuple[str, float | None]]:
        yield "server", self._server_ends_at()
        yield "own", _ends_at(self._tls.cert)
        yield "authority", _ends_at(self._tls.ca)


def written_folders(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Returns the folders of kernels and weights, and of temporary files."""
    home = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = Path(environ.get("HEARTH_CACHE_DIR") or Path(home) / "hearth")
    return cache, Path(tempfile.gettempdir())


def free_share(folder: Path) -> float | None:
    """Returns the share that others than root may still write, of the disk where the folder is, or
    will be; None if it cannot be read.
    """
    for there in (folder, *folder.parents):
        try:
            found = os.statvfs(there)
        except OSError:  # not there yet, or not for this user
            continue
        return found.f_bavail / found.f_blocks if found.f_blocks else None
    return None


def _ends_at(path: str) -> float | None:
    try:
        return certificate_ends_at(path) if path else None
    except ConfigError:  # a file that is being replaced
        return None

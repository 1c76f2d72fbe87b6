"""What ends, or fills up, on a machine, as a process exports it."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from shared.metrics.machine import MachineCollector, written_folders
from shared.tls import TlsFiles
from tests.support.certificates import DAY, Authority

ENDS = "hearth_nats_certificate_expiry_timestamp_seconds"
FREE = "hearth_disk_free_ratio"


def exported(collector: MachineCollector) -> dict[tuple[str, str], float]:
    """Returns values by the metric's name and its only label."""
    registry = CollectorRegistry()
    registry.register(collector)
    return {
        (sample.name, *sample.labels.values()): sample.value  # type: ignore[misc]
        for family in registry.collect()
        for sample in family.samples
    }


def test_ends_of_certificates_are_exported(tmp_path: Path) -> None:
    tls = Authority(tmp_path / "authority").issue("decode-1", days=13)
    found = exported(MachineCollector(tls, (), server_ends_at=lambda: 5.0))
    assert found == {
        (ENDS, "server"): 5.0,
        (ENDS, "own"): pytest.approx(time.time() + 13 * DAY.total_seconds(), abs=600.0),
        (ENDS, "authority"): pytest.approx(time.time() + DAY.total_seconds(), abs=600.0),
    }
    Path(tls.cert).write_text("half a fi")
    assert (ENDS, "own") not in exported(MachineCollector(tls, ()))
    assert exported(MachineCollector(TlsFiles(), ())) == {}


def test_free_share_of_disks_is_exported(tmp_path: Path) -> None:
    """Of a folder that is not there yet, too, and of one that cannot be looked at."""
    folders = tmp_path, tmp_path / "cache" / "hearth", tmp_path / ("c" * 300)
    found = exported(MachineCollector(TlsFiles(), folders))
    usage = shutil.disk_usage(tmp_path)
    for folder in folders:
        assert found[FREE, str(folder)] == pytest.approx(usage.free / usage.total, abs=0.05)


def test_folders_are_those_of_the_environment(tmp_path: Path) -> None:
    assert written_folders({"HEARTH_CACHE_DIR": "/c"})[0] == Path("/c")
    assert written_folders({"XDG_CACHE_HOME": "/x"})[0] == Path("/x/hearth")
    assert written_folders({})[0] == Path.home() / ".cache" / "hearth"

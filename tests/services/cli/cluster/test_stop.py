from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from services.cli.cluster.stop import stop_cluster
from services.local.state import StateDir, holder_of
from shared.errors import ConfigError

SCRIPT = """
import signal, sys
from pathlib import Path
from services.local.state import StateDir

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
state = StateDir.create(Path(sys.argv[1]))
print("running", flush=True)
signal.sigwait({signal.SIGTERM})
if sys.argv[2] == "hang":
    print("hangs", flush=True)
    sys.stdin.read()
state.close(retain_logs=False)
"""


def cluster(parent: Path, mode: str) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(parent), mode],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None and child.stdout.readline() == "running\n"
    return child


def test_cluster_of_another_process_is_stopped(tmp_path: Path) -> None:
    with cluster(tmp_path, "end") as child:
        assert f"process {child.pid}" in stop_cluster(tmp_path, timeout_s=30.0)
        assert child.wait(30) == 0
    with pytest.raises(ConfigError, match="no local cluster is running"):
        stop_cluster(tmp_path, timeout_s=30.0)


def test_cluster_that_goes_on_is_named(tmp_path: Path) -> None:
    with cluster(tmp_path, "hang") as child:
        with pytest.raises(ConfigError, match=f"process {child.pid}\\) still runs after 0 s"):
            stop_cluster(tmp_path, timeout_s=0.0)
        child.communicate("")


def test_cluster_that_has_failed_is_not_one_that_runs(tmp_path: Path) -> None:
    state = StateDir.create(tmp_path)
    assert holder_of(state.path) > 0
    state.close(retain_logs=True)
    with pytest.raises(ConfigError, match="no local cluster is running here"):
        stop_cluster(tmp_path, timeout_s=30.0)
    with pytest.raises(ConfigError, match="has just stopped"):
        holder_of(tmp_path)

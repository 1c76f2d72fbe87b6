from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.cli.cluster.service_options import DEMO_MODEL_DIR
from tests.support.cluster.hearth_up import Cluster, run_cluster

OPTIONS = ("--prefill", "0", "--decode", "0", "--both", "2")


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model, compressed."""
    folder = tmp_path_factory.mktemp("compressed") / "bundle"
    command = [sys.executable, "-m", "services", "compress", str(DEMO_MODEL_DIR), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert "mlp.up_proj" in done.stdout
    return folder


@pytest.fixture(scope="session")
def bundled(tmp_path_factory: pytest.TempPathFactory, bundle: Path) -> Iterator[Cluster]:
    """Two workers that run prefill and decode handlers over one engine, with the bundle. Neither
    hands a prompt to the other one.
    """
    folder = tmp_path_factory.mktemp("bundled")
    options = ("--model", str(bundle), *OPTIONS)
    with run_cluster(folder, *options, max_local_prefill_tokens=8192) as running:
        running.wait_until_ready("worker-1", "worker-2")
        yield running

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.cli.cluster.service_options import DEMO_MODEL_DIR
from tests.services.cli.in_process import call_hearth
from tests.support.cluster.model_cluster import ModelCluster, run_model

WORKERS = ("worker-1", "worker-2")


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model, compressed."""
    folder = tmp_path_factory.mktemp("compressed") / "bundle"
    done = call_hearth(("compress", str(DEMO_MODEL_DIR), str(folder)), os.environ)
    assert done.returncode == 0, done.stderr
    assert "mlp.up_proj" in done.stdout
    return folder


@pytest.fixture(scope="session")
def bundled(tmp_path_factory: pytest.TempPathFactory, bundle: Path) -> Iterator[ModelCluster]:
    """Two workers that run prefill and decode handlers over one engine, with the bundle. Neither
    hands a prompt to the other one.
    """
    folder = tmp_path_factory.mktemp("bundled")
    with run_model(folder, bundle, WORKERS, max_local_prefill_tokens=8192) as running:
        yield running

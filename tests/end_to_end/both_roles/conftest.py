from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.cli.cluster.service_options import DEMO_MODEL_DIR
from tests.services.cli.in_process import call_hearth
from tests.support.cluster.model_cluster import ModelCluster, run_model
from tests.support.cluster.while_used import WhileUsed

WORKERS = ("worker-1", "worker-2")
SHARED = WhileUsed[ModelCluster]("bundled", Path(__file__).parent)


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model, compressed."""
    folder = tmp_path_factory.mktemp("compressed") / "bundle"
    done = call_hearth(("compress", str(DEMO_MODEL_DIR), str(folder)), os.environ)
    assert done.returncode == 0, done.stderr
    assert "mlp.up_proj" in done.stdout
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    SHARED.gather_users(items)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    SHARED.end_unless_used(nextitem)


@pytest.fixture(scope="module")
def bundled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, bundle: Path
) -> ModelCluster:
    """Two workers that run prefill and decode handlers over one engine, with the bundle. Neither
    hands a prompt to the other one.
    """
    return SHARED.value(
        request,
        lambda: run_model(
            tmp_path_factory.mktemp("bundled"), bundle, WORKERS, max_local_prefill_tokens=8192
        ),
    )

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cluster.hearth_up import Cluster, run_cluster
from tests.support.cluster.while_used import WhileUsed

SHARED = WhileUsed[Cluster]("cluster", Path(__file__).parent)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    SHARED.gather_users(items)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    SHARED.end_unless_used(nextitem)


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """One prefill and one decode worker with the demo model; tests leave it as they find it."""
    return SHARED.value(request, lambda: run_cluster(tmp_path_factory.mktemp("cluster")))

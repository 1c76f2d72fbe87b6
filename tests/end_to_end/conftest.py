from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.cluster.hearth_up import Cluster, run_cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One prefill and one decode worker with the demo model; tests leave it as they find it."""
    with run_cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running

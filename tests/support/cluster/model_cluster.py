"""A cluster of one model, of forked processes: it starts in a fraction of the time of `hearth up`,
and nothing restarts what ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import httpx

from services.local.credentials import Credential
from services.local.state import LocalClusterState
from tests.support.cluster.chaos_cluster import ChaosCluster
from tests.support.cluster.cluster_client import ClusterClient
from tests.support.cluster.service_processes import OPERATOR_TOKEN
from tests.support.servers import PASSWORD

GATEWAY = "gateway-1"
CONTROL = ("kv_index-1", "scheduler-1", GATEWAY)


@dataclass
class ModelCluster(ClusterClient):
    processes: ChaosCluster

    def kill(self, process_id: str) -> None:
        self.processes.kill(process_id)


@contextlib.contextmanager
def run_model(
    folder: Path,
    model_dir: Path,
    workers: Iterable[str],
    options: Mapping[str, str] = {},
    *,
    options_of: Mapping[str, Mapping[str, str]] = {},
    max_local_prefill_tokens: int = 4,
) -> Iterator[ModelCluster]:
    """Serves `model_dir` under its name. `workers` are process ids, such as `worker-1`. By default
    workers hand off even short prompts.
    """
    workers = (*workers,)
    _compile_first(model_dir, [{**options, **options_of.get(each, {})} for each in workers])
    local = {"HEARTH_MAX_LOCAL_PREFILL_TOKENS": str(max_local_prefill_tokens)}
    processes = ChaosCluster(
        folder,
        step_s=None,
        model=(model_dir, model_dir.name),
        worker_options=options,
        services=(*CONTROL, *workers),
        environ_of={"scheduler-1": local},
        options_of=options_of,
    )
    try:
        asyncio.run(processes.start())
        state = _state_of(processes)
        headers = {"Authorization": f"Bearer {state.api_key}"}
        # an idle connection would hold the objects of its last response in the gateway
        limits = httpx.Limits(max_keepalive_connections=0)
        with httpx.Client(
            base_url=state.url, headers=headers, timeout=120, trust_env=False, limits=limits
        ) as client:
            yield ModelCluster(state, client, processes)
    finally:
        processes.stop()


class RenewedCluster(contextlib.ExitStack):
    """What the tests of a module share: a cluster, and a new one once a test has ended a process
    of it.
    """

    def __init__(self, start: Callable[[], AbstractContextManager[ModelCluster]]) -> None:
        super().__init__()
        self._start = start
        self._cluster: ModelCluster | None = None

    def cluster(self) -> ModelCluster:
        if self._cluster is None or self._cluster.processes.has_lost:
            self.close()
            self._cluster = self.enter_context(self._start())
        return self._cluster


def _compile_first(model_dir: Path, options_of_workers: Iterable[Mapping[str, str]]) -> None:
    """Compiles the workers' kernels in forked children. Those of a worker first import torch and
    numba, which takes 2 s of CPU each.
    """
    from kernels.ops import cpu_host
    from shared.engine.executors.loading.warm import compile_model
    from tests.support.kernels.compile_template import forked_compilers

    if not cpu_host().has_kernels:
        return
    with forked_compilers():
        for dtype, kv_dtype in {
            (each.get("dtype", "auto"), each.get("kv-dtype", "auto")) for each in options_of_workers
        }:
            compile_model(
                model_dir,
                dtype=dtype,
                kv_dtype=kv_dtype,
                weights="auto",
                block_size=16,
                has_rows=False,
            )


def _state_of(processes: ChaosCluster) -> LocalClusterState:
    return LocalClusterState(
        url=processes.urls[GATEWAY],
        api_key=processes.api_key,
        operator_token=OPERATOR_TOKEN,
        nats_host="127.0.0.1",
        nats_port=processes.nats_port,
        redis_url=processes.redis_url,
        credentials=tuple(
            Credential(role, name, PASSWORD) for name, role in processes.services.items()
        ),
    )

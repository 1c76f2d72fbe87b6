"""A cluster whose workers compute tokens that depend on all KV before them, and may fail."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.adversity.worker import StepFaults
from benchmarks.serving.cluster import SERVICES, Cluster, Process, running
from shared.subjects import CredentialRole
from shared.transport.server_config import NatsUser
from tests.support.cluster.service_processes import MODEL
from tests.support.servers import PASSWORD, PRODUCT_PINGS, NatsServer, RedisServer

NO_FAULTS = StepFaults()


class FaultyCluster(Cluster):
    def start_worker(
        self,
        role: CredentialRole,
        process_id: str,
        *,
        step_s: float = 0.01,
        faults: StepFaults = NO_FAULTS,
        **others: Any,
    ) -> Process:
        """Starts a worker with `faults`. `others` are further arguments of `start`."""
        module = ["-m", "benchmarks.adversity.worker", role]
        command = [*module, str(step_s), str(faults.after_s), str(faults.poison_seed), *MODEL]
        return self.start(role, process_id, command=command, **others)

    def start_services(self, environ: Mapping[str, str] = {}) -> Process:
        """Starts an index, a scheduler and a gateway. Returns the gateway."""
        options = {"region": self.region}
        services = [self.start(each, each, environ=environ, options=options) for each in SERVICES]
        return services[-1]


@asynccontextmanager
async def cluster(
    workers: Mapping[str, CredentialRole], *, region: str = "", regions: Mapping[str, str] = {}
) -> AsyncIterator[FaultyCluster]:
    """NATS and Redis with credentials for the services, which are in `region`, and for `workers`,
    of which some are in `regions`. No process runs yet.
    """
    users = [NatsUser(role, role, PASSWORD, region) for role in SERVICES.values()]
    users += [NatsUser(role, n, PASSWORD, regions.get(n, "")) for n, role in workers.items()]
    with TemporaryDirectory(prefix="hearth-adversity-") as name:
        folder = Path(name)
        # A process takes the name of a frozen one once the server has dropped that one.
        nats = NatsServer(folder, users, max_pings=PRODUCT_PINGS)
        started = FaultyCluster(folder, nats, RedisServer(), region)
        async with running(started):
            yield started

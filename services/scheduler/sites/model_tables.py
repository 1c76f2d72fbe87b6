"""The workers that serve one model, here and at other sites."""

from __future__ import annotations

from math import inf

from services.scheduler.throughput import ModelThroughput, Speed
from services.scheduler.worker_table import WorkerRow, WorkerTable
from shared.messages import WorkerLoad
from shared.sites.kv_targets import KV_FROM_SITES
from shared.subjects import is_at_site


class ModelTables:
    """Prefill workers of other sites are among `prefills`: they push KV to decode workers here."""

    def __init__(self) -> None:
        self.decodes, self.prefills = WorkerTable(), WorkerTable()
        self.sites = WorkerTable()  # gateways of other sites, which decode and prefill there
        self.speeds = ModelThroughput()
        self.nearest_s, self.nearest_at = inf, -inf  # round trip to the nearest site, and its age

    def put(self, roles: tuple[str, ...], worker: WorkerRow) -> None:
        if "decode" in roles:
            (self.sites if is_at_site(worker.worker_id) else self.decodes).put(worker)
        if "prefill" in roles:
            self.prefills.put(worker)

    def observe(self, worker_id: str, load: WorkerLoad) -> Speed:
        """Returns the speed of a worker. What a site claims is no prior of others' speeds."""
        return self.speeds.observe(worker_id, load, is_prior=not is_at_site(worker_id))

    def leave_roles(self, worker_id: str) -> None:
        """Removes a worker from its tables. Its speed stays: it is the same in another role."""
        for table in (self.decodes, self.prefills, self.sites):
            table.remove(worker_id)

    def remove(self, worker_id: str) -> None:
        self.leave_roles(worker_id)
        self.speeds.forget(worker_id)

    @property
    def receives_from_sites(self) -> bool:
        """Whether the decode workers here take KV from other sites. Placement chooses among the
        prefill workers for any of them, so a single one of an older release excludes sites.
        """
        return len(self.decodes) > 0 and self.decodes.all_have(KV_FROM_SITES)

    @property
    def is_empty(self) -> bool:
        return not (len(self.decodes) or len(self.prefills) or len(self.sites))

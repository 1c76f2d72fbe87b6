"""The state of a fleet as people see it: processes, their speeds, lost processes. No I/O.

Speeds are differences of the counters in heartbeats over the last WINDOW_S. A process that stopped
in order is shown for SHOW_STOPPED_S. One that was lost is shown until it returns, until a new
process of its credential takes its place, or for SHOW_LOST_S.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from shared.fleet.host_view import HostView, ModelView, host_view, in_order, model_views
from shared.fleet.link_view import LinkView, LinkViews
from shared.fleet.load_rates import load_rates
from shared.fleet.tenant_views import (
    TenantRefusal,
    TenantSite,
    tenant_refusals,
    tenant_sites,
)
from shared.lifecycle.health import SILENCE_LIMIT_S, Fleet, Loss
from shared.messages import (
    DeviceHealth,
    Heartbeat,
    IndexState,
    KvLinks,
    ModelCard,
    Role,
    RoleDemand,
    WorkerLoad,
)
from shared.metrics.role_demands import total_demands
from shared.subjects import credential_of

WINDOW_S = 2.0
HITS_WINDOW_S = 60.0
HITS_SAMPLE_S = 5.0  # time between two readings of the counters of hits
SHOW_STOPPED_S = 10.0
SHOW_LOST_S = 3600.0  # who looks at night looks late
_WORKER_ROLES = {"encode", "prefill", "decode"}
_LOST_STATES = {loss.value for loss in Loss}
_OWN_ID = ""  # no process has this id, whichever process's credential is in use
_ORDER: tuple[Role, ...] = (
    *("encode", "prefill", "decode", "gateway", "scheduler", "kv_index", "host"),
)


class ProcessView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One row of the table. Rates are tokens per second; a hit is a prompt token
    found in the cache.
    """

    process_id: str
    role: str
    # announced state, the phase of a start (loading, compiling), or the kind of loss: silent, stuck
    state: str
    state_age_s: int | None = None  # full seconds in a state other than ready and standby
    region: str = ""
    host: str = ""
    release: str = ""
    model: str = ""
    revision: str = ""
    device: str = ""  # instruction set or architecture that the kernels use
    mode: str = ""  # that of its numerics
    step_launch: str = ""  # of a GPU's decode steps: graphs or plain; cudnn
    kv_bytes: int | None = None  # size of the KV cache
    num_running: int | None = None
    num_waiting: int | None = None
    num_free_blocks: int | None = None
    num_total_blocks: int | None = None
    generated_per_s: float | None = None
    prefilled_per_s: float | None = None
    busy_ratio: float | None = None  # share of the time in which it computed steps
    # What these steps moved and computed, in two digits; the ratios are to the peaks of the device
    traffic_bytes_per_s: float | None = None
    operations_per_s: float | None = None
    bandwidth_ratio: float | None = None
    arithmetic_ratio: float | None = None
    hit_ratio: float | None = None  # ratio since its start
    recent_hit_ratio: float | None = None  # ratio over the last HITS_WINDOW_S
    step_age_s: int | None = None  # time since its last step, at least one full second
    num_failed_steps: int | None = None
    num_out_of_memory: int | None = None  # see WorkerLoad, as the next one; None: never
    max_step_tokens: int | None = None
    expert_imbalance: float | None = None  # see WorkerLoad; None: no experts, or too few tokens
    device_health: DeviceHealth | None = None
    index_state: IndexState | None = None
    num_indexed_blocks: int | None = None
    # Counters since the start of a gateway: see GatewayLoad.
    num_unlike_prefills: int | None = None
    num_numerics_changes: int | None = None
    num_open_streams: int | None = None  # a gateway's open streams now
    num_queued_requests: int | None = None  # a scheduler's queued requests
    oldest_wait_s: float | None = None
    num_handoffs_in_flight: int | None = None
    num_encoded_images: int | None = None
    saved_kv_bytes: int | None = None
    kv_links: str = ""  # a prefill worker's, by port and place

    @property
    def is_worker(self) -> bool:
        return not _WORKER_ROLES.isdisjoint(self.role.split("+"))

    @property
    def is_lost(self) -> bool:
        return self.state in _LOST_STATES

    @property
    def has_stopped(self) -> bool:
        """Whether it left in order, which is no loss."""
        return self.state == Loss.STOPPED.value


@dataclass(slots=True)
class _KnownProcess:
    heartbeat: Heartbeat
    loads: deque[tuple[float, WorkerLoad]] = field(default_factory=deque)
    loss: Loss | None = None
    changed_at: float = 0.0  # time since which it has this state
    step: int = -1
    stepped_at: float = 0.0
    prompts: deque[tuple[float, WorkerLoad]] = field(default_factory=deque)  # samples for hits

    @property
    def state(self) -> str:
        """Returns the state that the process announced, or the phase of its start, or the kind of
        its loss.
        """
        if self.loss is not None:
            return self.loss.value
        starting = self.heartbeat.starting
        return self.heartbeat.state if starting is None else starting.phase

    def transition_to(self, heartbeat: Heartbeat, loss: Loss | None, now: float) -> None:
        before = self.state
        self.heartbeat, self.loss = heartbeat, loss
        if self.state != before:
            self.changed_at = now

    def is_shown(self, now: float) -> bool:
        shown_s = SHOW_STOPPED_S if self.loss is Loss.STOPPED else SHOW_LOST_S
        return self.loss is None or now - self.changed_at <= shown_s


class FleetView:
    """The state of all processes, for display. `fleet` belongs to a process that observes its peers
    itself, and calls `lose`. By default the view has its own, to which `echo` and `tick` belong.
    """

    def __init__(self, fleet: Fleet | None = None) -> None:
        self._fleet = Fleet(_OWN_ID) if fleet is None else fleet
        self._is_own_fleet = fleet is None
        self._known: dict[str, _KnownProcess] = {}
        self._links = LinkViews()

    def observe(self, heartbeat: Heartbeat, now: float) -> None:
        self._links.observe(heartbeat, now)
        loss = self._fleet.observe(heartbeat, now) if self._is_own_fleet else None
        known = self._known.get(heartbeat.process_id)
        if heartbeat.state == "stopped":
            self.lose(heartbeat.process_id, Loss.STOPPED, now)
            return
        if known is None and not self._is_known(heartbeat.process_id):  # the peer limit is exceeded
            return
        if known is None:
            self._replace_lost(heartbeat.process_id)
        if known is None or loss is Loss.RESTARTED or known.heartbeat.epoch != heartbeat.epoch:
            known = self._known[heartbeat.process_id] = _KnownProcess(heartbeat, changed_at=now)
        is_stuck = self._fleet.is_lost(heartbeat.process_id)  # it sends, so it is not silent
        known.transition_to(heartbeat, Loss.STUCK if is_stuck else None, now)
        _record_load(known, now)

    def _replace_lost(self, process_id: str) -> None:
        """A new process takes the place of one of its credential that was lost: the first one."""
        credential = credential_of(process_id)
        lost = {
            name: known.changed_at
            for name, known in self._known.items()
            if known.loss is not None and credential_of(name) == credential
        }
        if lost:
            del self._known[min(lost, key=lost.__getitem__)]

    def echo(self, now: float) -> None:
        """Records a reply of the server: silence since then is a peer's, not the network's."""
        own = Heartbeat(
            process_id=_OWN_ID, epoch=0, sequence_number=0, roles=(), state="ready", interval_s=0.0
        )
        self._fleet.observe(own, now)

    def tick(self, now: float) -> None:
        for process_id, loss in self._fleet.tick(now):
            self.lose(process_id, loss, now)
        self.forget(now)

    def forget(self, now: float) -> None:
        """Drops the processes that were lost, or have stopped, too long ago."""
        self._known = {name: each for name, each in self._known.items() if each.is_shown(now)}

    def rows(self, now: float | None = None) -> list[ProcessView]:
        """Returns the workers, then the other processes, by role and name. Ages need `now`."""
        return in_order_of_roles(_view(known, now) for known in self._known.values())

    def hosts(self) -> list[HostView]:
        """Returns the hosts by name. They are in `rows`, too."""
        return [host_view(each.heartbeat, each.state) for each in self._hosts()]

    def models(self) -> list[ModelView]:
        """Returns the models of all hosts."""
        return in_order(
            model
            for each in self._hosts()
            if each.heartbeat.host is not None
            for model in model_views(
                host_view(each.heartbeat, each.state), each.heartbeat.host.models
            )
        )

    def demands(self) -> list[RoleDemand]:
        """Returns the demands that live schedulers advise."""
        return total_demands(self._live())

    def links(self, models: Mapping[str, Sequence[str]] | None = None) -> list[LinkView]:
        """Returns the links to other sites. `models` are those of each site, if they are known."""
        return self._links.views(lambda name: name in self and not self.is_lost(name), models or {})

    def tenant_sites(self) -> list[TenantSite]:
        """Returns where the requests of each tenant ended; empty without links and regions."""
        return tenant_sites(self._live())

    def tenant_refusals(self) -> list[TenantRefusal]:
        """Returns what live processes have refused to have of each tenant's data."""
        return tenant_refusals(self._live())

    def _live(self) -> Iterator[Heartbeat]:
        return (each.heartbeat for each in self._known.values() if each.loss is None)

    def _hosts(self) -> list[_KnownProcess]:
        known = (each for each in self._known.values() if "host" in each.heartbeat.roles)
        return sorted(known, key=lambda each: each.heartbeat.process_id)

    def __contains__(self, process_id: str) -> bool:
        return process_id in self._known

    def is_lost(self, process_id: str) -> bool:
        known = self._known.get(process_id)
        return known is not None and known.loss is not None

    def _is_known(self, process_id: str) -> bool:
        is_own = process_id == self._fleet.own_process_id
        return is_own or self._fleet.heartbeat_of(process_id) is not None

    def lose(self, process_id: str, loss: Loss, now: float) -> None:
        known = self._known.get(process_id)
        if known is not None and known.loss is not loss:
            known.transition_to(known.heartbeat, loss, now)
            known.loads.clear()


def in_order_of_roles(views: Iterable[ProcessView]) -> list[ProcessView]:
    """Sorts by role, workers first, and by name."""
    return sorted(views, key=lambda view: (_rank(view), view.process_id))


def _record_load(known: _KnownProcess, now: float) -> None:
    load = known.heartbeat.load
    if load is None:
        return
    loads = known.loads
    if loads and now - loads[-1][0] > SILENCE_LIMIT_S:
        loads.clear()
    loads.append((now, load))
    while now - loads[0][0] > WINDOW_S:
        loads.popleft()
    if load.step != known.step:
        known.step, known.stepped_at = load.step, now
    _record_prompts(known.prompts, load, now)


def _record_prompts(prompts: deque[tuple[float, WorkerLoad]], load: WorkerLoad, now: float) -> None:
    if prompts and now - prompts[-1][0] < HITS_SAMPLE_S:
        return
    prompts.append((now, load))
    while now - prompts[0][0] > HITS_WINDOW_S:
        prompts.popleft()


def _rank(view: ProcessView) -> int:
    first = view.role.partition("+")[0]
    return next((rank for rank, role in enumerate(_ORDER) if role == first), len(_ORDER))


def _view(known: _KnownProcess, now: float | None) -> ProcessView:
    heartbeat = known.heartbeat
    return ProcessView(
        process_id=heartbeat.process_id,
        role=_role_name(heartbeat),
        state=known.state,
        state_age_s=None if now is None else _state_age(known, now),
        region=heartbeat.region,
        host=heartbeat.host_name,
        release=heartbeat.release,
        model=_model_name(heartbeat),
        **({} if heartbeat.model is None else _fields_of_card(heartbeat.model)),
        **_fields_of_role(known, now),
    )


def _fields_of_card(card: ModelCard) -> dict[str, Any]:
    return {
        "revision": card.revision[:12],
        "device": card.numerics.device,
        "mode": card.numerics.mode,
        "step_launch": card.step_launch or "",
    }


def _fields_of_role(known: _KnownProcess, now: float | None) -> dict[str, Any]:
    heartbeat = known.heartbeat
    if (index := heartbeat.index) is not None:
        return {"index_state": index.state, "num_indexed_blocks": index.num_blocks}
    if (gateway := heartbeat.gateway) is not None:
        return {
            "num_unlike_prefills": gateway.num_unlike_prefills,
            "num_numerics_changes": gateway.num_numerics_changes,
            "num_open_streams": gateway.num_open_streams,
        }
    if (scheduler := heartbeat.scheduler) is not None:
        return {
            "num_queued_requests": scheduler.num_queued_requests,
            "oldest_wait_s": round(scheduler.oldest_wait_s, 1),
        }
    return {} if heartbeat.load is None else _fields_of_load(known, heartbeat.load, now)


def _fields_of_load(known: _KnownProcess, load: WorkerLoad, now: float | None) -> dict[str, Any]:
    num_prompt, num_cached = load.num_prompt_tokens, load.num_cached_prompt_tokens
    return {
        "num_running": load.num_running,
        "num_waiting": load.num_waiting,
        "num_free_blocks": load.num_free_blocks,
        "num_total_blocks": load.num_total_blocks,
        "kv_bytes": _kv_bytes(known.heartbeat.model, load),
        **load_rates(known.loads),
        "hit_ratio": round(num_cached / num_prompt, 3) if num_prompt else None,
        "recent_hit_ratio": _recent_hit_ratio(known, load),
        "step_age_s": None if now is None else int(now - known.stepped_at) or None,
        "num_failed_steps": load.num_failed_steps,
        "num_out_of_memory": load.num_out_of_memory or None,
        "max_step_tokens": load.max_step_tokens or None,
        "expert_imbalance": round(load.expert_imbalance, 2) or None,
        "device_health": load.device_health,
        "num_handoffs_in_flight": load.num_handoffs_in_flight,
        "num_encoded_images": load.num_encoded_images or None,
        "saved_kv_bytes": load.saved_kv_bytes,
        "kv_links": ", ".join(map(_links_text, load.kv_links)),
    }


def _links_text(links: KvLinks) -> str:
    """Returns such as `2 memfd (same host)`, or `1 tcp (other host, nixl failed)`."""
    refused = f", {links.refused} failed" if links.refused else ""
    return f"{links.num_links} {links.port} ({links.place}{refused})"


def _role_name(heartbeat: Heartbeat) -> str:
    encodes = heartbeat.encoder is not None and "encode" not in heartbeat.roles
    return "+".join(("encode", *heartbeat.roles) if encodes else heartbeat.roles)


def _model_name(heartbeat: Heartbeat) -> str:
    if heartbeat.starting is not None:
        return heartbeat.starting.model
    if heartbeat.model is None and heartbeat.encoder is not None:
        return heartbeat.encoder.model
    return "" if heartbeat.model is None else heartbeat.model.name


def _state_age(known: _KnownProcess, now: float) -> int | None:
    is_at_rest = known.state in ("ready", "standby")
    return None if is_at_rest else int(now - known.changed_at)


def _kv_bytes(card: ModelCard | None, load: WorkerLoad) -> int | None:
    if card is None or not card.kv_bytes_per_token:
        return None
    return load.num_total_blocks * card.block_size * card.kv_bytes_per_token


def _recent_hit_ratio(known: _KnownProcess, load: WorkerLoad) -> float | None:
    """Returns the hit ratio of the window, or None without a prompt in it."""
    if not known.prompts:
        return None
    before = known.prompts[0][1]
    num_tokens = load.num_prompt_tokens - before.num_prompt_tokens
    num_hits = load.num_cached_prompt_tokens - before.num_cached_prompt_tokens
    return round(num_hits / num_tokens, 2) if num_tokens > 0 else None

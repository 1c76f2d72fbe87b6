"""A full fleet on virtual time, and its faults."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from math import inf
from random import Random

import msgspec

from services.gateway.streams.actions import Report
from shared.engine.executors.timing_executor import STATE_BYTES
from shared.errors import HearthError
from shared.kv_wire.link import FrameHeader
from shared.messages import ChangeRoles, Done, Role
from shared.packing import pack_token_ids
from shared.regions.region_classes import NO_CLASSES, RegionClasses
from shared.subjects import lifecycle
from shared.tenancy.prefixes import pinned_prefix
from shared.tenancy.prefixes.pinned_prefix import PinnedPrefix
from shared.tenancy.tenant_admin import TenantAdmin, store_api_key
from tests.simulation.checks.excuses import TWIN_GONE_S, Trouble
from tests.simulation.checks.monitor import Monitor, tasks_left
from tests.simulation.plan import POISON, TENANTS, Fault, Plan
from tests.simulation.world.client import Client
from tests.simulation.world.gateway import SimulatedGateway
from tests.simulation.world.hosts import SimulatedHost
from tests.simulation.world.members import (
    AnyHost,
    Member,
    health_monitor_of,
)
from tests.support.world.bus import SimulatedNetwork
from tests.support.world.kv_link import HARMLESS, DataPlane, FrameFate
from tests.support.world.leaks import of_index
from tests.support.world.ranks import STOPPED_S
from tests.support.world.services import SimulatedIndex, SimulatedScheduler
from tests.support.world.store import MemoryStore
from tests.support.world.workers import BLOCK_SIZE, MODEL, SimulatedWorker

JOIN_S = 0.5
RESTART_S = 0.5  # from the exit of a worker to its next start
MAX_DOUBLED_S = 20.0  # longer than all faults that keep two processes of one id apart
CHANGE_TIMEOUT_S = 0.5  # of a command to an idle worker
LEAVE_S = 0.1  # from the loss of its device until its absence is noticed here
PINNED = PinnedPrefix(
    name="system-prompt",
    tenant_id=TENANTS[0],
    model=MODEL,
    messages=[],
    token_ids=pack_token_ids(range(100, 140)),
    created_at=0,
)
WORKER_ROLES: dict[str, tuple[Role, ...]] = {
    "prefill": ("prefill",),
    "decode": ("decode",),
    "worker": ("prefill", "decode"),
}
_SEED_STEP = 1_000_003
# No request reaches these limits, but all are counted against them.
AMPLE = {"requests_per_min": 10**6, "output_tokens_per_min": 10**9, "concurrency": 10**6}


class Fleet:
    gateway_type: type[SimulatedGateway] = SimulatedGateway
    classes: RegionClasses = NO_CLASSES  # that its processes know

    def __init__(self, plan: Plan, *, site: str = "", region: str = "") -> None:
        """With `site` it is one of several linked sites, in `region`."""
        self.plan, self.site, self.region = plan, site, region
        self.network = SimulatedNetwork(seed=plan.seed)
        self.network.jitter_s = 0.0004
        self.plane = DataPlane(fate=self._frame_fate, distance_s=plan.fleet.delay_s)
        if plan.fleet.delays_s:
            self.network.distance_s = plan.fleet.delay_s
        self.store = MemoryStore()
        self.members: dict[str, Member] = {}
        self.clients = [Client(request) for request in plan.requests]
        needs = {each.request_id: each.needs for each in plan.requests}
        self.monitor = Monitor(defaultdict(tuple, needs) if site else needs)
        self.on_given_up: Callable[[bytes], None] = self.given_up
        self.troubles: list[Trouble] = []
        self.incapable: dict[str, list[Trouble]] = defaultdict(list)  # by worker
        self.not_decoding: dict[str, list[Trouble]] = defaultdict(list)  # by worker
        self.reports: list[Report] = []  # of all gateways
        self._random = Random(plan.seed + 1)
        self._num_lives = 0
        self._num_restarts: Counter[str] = Counter()  # by worker
        self._twins: dict[str, Member] = {}  # the second process of an id
        self._succeeded_at: dict[str, float] = {}  # when it became the first
        self._replacing: set[asyncio.Task[None]] = set()
        self._operator = self.network.bus("operator-0")
        self._noises: list[Fault] = []
        self._deaf: list[Fault] = []
        self._link_noises: list[Fault] = []

    # ── members ──────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        await self.store_tenants()
        for role, process_ids in self.plan.fleet.process_ids.items():
            for process_id in process_ids:
                member = Member(self.network, self._host(role, process_id))
                self.members[process_id] = member
                await member.start()

    async def store_tenants(self) -> None:
        for tenant_id in TENANTS:
            await store_api_key(self.store, tenant_id, tenant_id)
            await TenantAdmin(self.store, self.store.now).change(tenant_id, AMPLE)
        if self.plan.seed % 2:  # workers compute it, and recompute it after losing it
            await pinned_prefix.save(self.store, PINNED, 0.0)

    def region_of(self, process_id: str) -> str:
        """Returns the region that a process states: in a site with one, its own or the site's."""
        regions = self.plan.fleet.regions
        return regions.get(process_id, self.region) if self.site else self.region

    def hosts(self) -> list[AnyHost]:
        return [member.host for member in self.members.values() if member.is_up]

    def gateways(self) -> list[SimulatedGateway]:
        return [host for host in self.hosts() if isinstance(host, SimulatedGateway)]

    def workers(self) -> list[SimulatedWorker]:
        return [host for host in self.hosts() if isinstance(host, SimulatedWorker)]

    def model_hosts(self) -> list[SimulatedHost]:
        return [host for host in self.hosts() if isinstance(host, SimulatedHost)]

    @property
    def is_replacing(self) -> bool:
        return bool(self._replacing)

    def indices(self) -> list[SimulatedIndex]:
        return [host for host in self.hosts() if isinstance(host, SimulatedIndex)]

    def _host(self, role: str, process_id: str) -> AnyHost:
        host = self._new_host(role, process_id)
        self.monitor.watch(host)
        health_monitor_of(host).on_name_in_use = lambda _: self._leave(host)
        return host

    def _new_host(self, role: str, process_id: str) -> AnyHost:
        self._num_lives += 1
        seed = self.plan.seed * _SEED_STEP + self._num_lives
        fleet = self.plan.fleet
        match role:
            case "gateway":
                return self.gateway_type(
                    self.network,
                    self.store,
                    process_id,
                    seed=seed,
                    on_given_up=lambda placement_id: self.on_given_up(placement_id),
                    on_report=self.reports.append,
                    site=self.site,
                    region=self.region,
                    classes=self.classes,
                )
            case "scheduler":
                return SimulatedScheduler(
                    self.network,
                    process_id,
                    seed=seed,
                    max_queued_requests=fleet.max_queued_requests,
                    max_local_prefill_tokens=_max_local_prefill_tokens(seed),
                    automatic_roles="on" if fleet.has_automatic_roles else "off",
                    role_change_min_s=0.3,
                    site=self.site,
                    region=self.region,
                    classes=self.classes,
                )
            case "host":
                assert fleet.hosted is not None
                return SimulatedHost(
                    self.network,
                    process_id,
                    fleet.hosted,
                    seed=seed,
                    floor_bytes=fleet.num_blocks * BLOCK_SIZE * STATE_BYTES,
                    start_worker=self._start_hosted,
                )
            case "kv_index":
                index = SimulatedIndex(
                    self.network,
                    self.store,
                    process_id,
                    seed=seed,
                    region=self.region,
                    classes=self.classes,
                )
                index.is_only_writer = not self._is_doubled(process_id)
                return index
            case _:
                num_restarts = self._num_restarts[process_id]
                features = fleet.features_of(process_id, num_restarts)
                _record(self.incapable[process_id], process_id, has_it=bool(features))
                _record(self.not_decoding[process_id], process_id, has_it=True)
                worker = SimulatedWorker(
                    self.network,
                    self.plane,
                    process_id,
                    WORKER_ROLES[role],
                    num_blocks=fleet.num_blocks_of(process_id) * len(fleet.reaches),
                    reaches=fleet.reaches,
                    block_size=fleet.block_size_of(process_id),
                    max_batch_tokens=fleet.max_batch_tokens,
                    max_sequences=fleet.max_sequences,
                    cost=fleet.cost,
                    copy_s=fleet.copy_s,
                    seed=seed,
                    variant=int(process_id in fleet.unlike),
                    features=features,
                    is_older=fleet.is_older(process_id, num_restarts),
                    group=fleet.groups.get(process_id),
                    region=self.region_of(process_id),
                    classes=self.classes,
                )
                worker.executor.poison = frozenset({POISON})
                self._watch_roles(worker)
                return worker

    def _watch_roles(self, worker: SimulatedWorker) -> None:
        roles, spans = worker.worker.roles, self.not_decoding[worker.worker_id]
        change = roles.change

        def changed(command: ChangeRoles, now: float) -> bool:
            has_changed = change(command, now)
            _record(spans, worker.worker_id, has_it="decode" in roles.current)
            return has_changed

        roles.change = changed  # type: ignore[method-assign]

    def _hosted_worker(self, worker_id: str, model: str, num_blocks: int) -> SimulatedWorker:
        fleet = self.plan.fleet
        self._num_lives += 1
        return SimulatedWorker(
            self.network,
            self.plane,
            worker_id,
            WORKER_ROLES["worker"],
            num_blocks=num_blocks,
            num_floor_blocks=fleet.num_blocks,
            max_blocks=2 * fleet.num_blocks,
            max_batch_tokens=fleet.max_batch_tokens,
            max_sequences=fleet.max_sequences,
            cost=fleet.cost,
            copy_s=fleet.copy_s,
            seed=self.plan.seed * _SEED_STEP + self._num_lives,
            model=model,
        )

    async def _start_hosted(self, worker_id: str, model: str, kv_bytes: int) -> Member:
        """Starts a worker for its host."""
        worker = self._hosted_worker(worker_id, model, kv_bytes // (BLOCK_SIZE * STATE_BYTES))
        self.monitor.watch(worker)
        member = self.members[worker_id] = Member(self.network, worker)
        await member.start()
        return member

    def troubles_of(self, client: Client) -> list[Trouble]:
        """All that may explain a failure of this client's request."""
        lacking = chain(*self.incapable.values()) if client.plan.needs else ()
        return [*self.troubles, *lacking, *chain(*self.not_decoding.values())]

    def _is_doubled(self, process_id: str) -> bool:
        return any(each.kind == "twin" and each.target == process_id for each in self.plan.faults)

    # ── requests ─────────────────────────────────────────────────────────────────────────────────

    async def serve(self) -> None:
        """Sends each request to a live gateway at its time."""
        for client in sorted(self.clients, key=lambda each: each.plan.at_s):
            await self._until(client.plan.at_s)
            gateways = [each for each in self.gateways() if not each.process.is_frozen]
            if gateways:
                gateway = self._random.choice(gateways)
                gateway.process.start(gateway.serve(client))

    def leaks(self) -> list[str]:
        """Leftovers of requests, on any live process, and what an index has missed."""
        found, workers = [], self.workers()
        for host in self.hosts():
            process_id = host.process.process_id
            found += [f"{process_id}: {each}" for each in host.leaks()]
            if not isinstance(host, SimulatedHost):  # it starts, parks and resizes on its own
                found += tasks_left(host)
        for index in self.indices():
            process_id = index.process.process_id
            for _, one in index.service.indexes.items():
                found += [f"{process_id}: {each}" for each in of_index(one, workers)]
        return found

    # ── faults ───────────────────────────────────────────────────────────────────────────────────

    async def suffer(self) -> None:
        """Runs until the last fault has passed."""
        async with asyncio.TaskGroup() as group:
            for fault in self.plan.faults:
                group.create_task(self._befall(fault))

    async def _befall(self, fault: Fault) -> None:
        await self._until(fault.at_s)
        loop = asyncio.get_running_loop()
        trouble = Trouble(fault, loop.time())
        self.troubles.append(trouble)
        await self._inflict(fault)
        is_over = fault.kind not in ("kill", "drain") or fault.comes_back
        trouble.ended = loop.time() if is_over else inf

    async def _inflict(self, fault: Fault) -> None:
        match fault.kind:
            case "kill" | "drain":
                await self._end(fault)
            case "freeze" | "slow" | "wedge" | "cut_off":
                await self._impede(fault)
            case "runner_raises":
                await self._fail_steps(fault)
            case "gpu_faulty":
                await self._fence(fault)
            case "rank_killed" | "rank_frozen":
                await self._lose_rank(fault)
            case "twin":
                await self._double(fault)
            case "link_drop":
                self.members[fault.target].host.drop_links()
            case "noise":
                await self._disturb(self._noises, fault)
            case "deaf":
                await self._disturb(self._deaf, fault)
            case "wake_hangs" | "dies_after_wake" | "model_removed":
                await self._disturb_host(fault)
            case "link_noise":
                self._link_noises.append(fault)
                await asyncio.sleep(fault.duration_s)
                self._link_noises.remove(fault)
            case "nats_restart" | "nats_hang":
                await self._take_nats_away(fault)
            case "redis_away" | "redis_hang":
                await self._take_redis_away(fault)
            case "change_roles":
                await self._change_roles(fault)

    async def _change_roles(self, fault: Fault) -> None:
        """A message to a process that is away is lost, or takes effect later."""
        subject, command = lifecycle("decode", fault.target), ChangeRoles(roles=fault.roles)
        with suppress(HearthError):
            await self._operator.request(subject, command, Done, timeout_s=CHANGE_TIMEOUT_S)

    async def _disturb_host(self, fault: Fault) -> None:
        """`target`: a host, or the model that is removed from all."""
        if fault.kind == "model_removed":
            for host in self.model_hosts():
                host.remove_model(fault.target)
            await asyncio.sleep(fault.duration_s)
            for host in self.model_hosts():
                host.add_model(fault.target)
            return
        host = self.members[fault.target].host
        if isinstance(host, SimulatedHost):
            host.fault = fault.kind
            await asyncio.sleep(fault.duration_s)
            host.fault = None

    async def _disturb(self, active: list[Fault], fault: Fault) -> None:
        active.append(fault)
        self.network.fate = self._message_fate
        await asyncio.sleep(fault.duration_s)
        active.remove(fault)
        if not self._noises and not self._deaf:
            self.network.fate = None

    async def _end(self, fault: Fault) -> None:
        member = self.members[fault.target]
        if not member.is_up or (fault.kind == "drain" and member.host.process.is_frozen):
            return
        clients = member.host.clients if isinstance(member.host, SimulatedGateway) else []
        if fault.kind == "kill":
            self._lose_clients(member.host)
            await member.kill()
        else:
            await member.terminate()
            for client in clients:  # those that waited for admission
                client.lost_gateway |= client.is_open
        self._succeed(member)
        if fault.comes_back:
            await asyncio.sleep(fault.duration_s)
            await self._restart(member)

    async def _restart(self, member: Member) -> None:
        await self._until_connectable()
        if not member.is_up:
            self._num_restarts[member.process_id] += 1
            member.host = self._host(member.process_id.split("-")[0], member.process_id)
            await member.start()

    async def _until_connectable(self) -> None:
        while self.network.is_away or self.network.is_hanging:
            await asyncio.sleep(0.1)

    async def stop(self) -> None:
        for member in (*self.members.values(), *self._twins.values()):
            if member.is_up:
                await member.kill()

    async def _fail_steps(self, fault: Fault) -> None:
        member = self.members[fault.target]
        host = member.host
        if not member.is_up or not isinstance(host, SimulatedWorker):
            return
        host.executor.step_raises = lambda: self._random.random() < fault.amount
        host.executor.check_raises = fault.amount == 1
        await asyncio.sleep(fault.duration_s)
        host.executor.step_raises, host.executor.check_raises = lambda: False, False

    async def _fence(self, fault: Fault) -> None:
        """The health of a GPU ends its worker, though its steps succeed."""
        host = self.members[fault.target].host
        if isinstance(host, SimulatedWorker):
            host.worker.loop.fence("Xid 79")
            await asyncio.sleep(LEAVE_S)

    async def _lose_rank(self, fault: Fault) -> None:
        """Returns once the worker has left, if it was up."""
        host = self.members[fault.target].host
        if isinstance(host, SimulatedWorker) and host.executor.group is not None:
            if fault.kind == "rank_killed":
                host.executor.kill_rank()
            else:
                host.executor.freeze_rank()
            await asyncio.sleep(STOPPED_S + 2 * LEAVE_S)

    def supervise(self) -> None:
        """Starts each worker again that has left with its device, with a good one."""
        for member in self.members.values():
            if member.is_up and member.host.process.is_dead:
                task = asyncio.get_running_loop().create_task(self._replace(member))
                self._replacing.add(task)
                task.add_done_callback(self._replacing.discard)

    async def _replace(self, member: Member) -> None:
        loop = asyncio.get_running_loop()
        lost = Fault(at_s=loop.time() - JOIN_S, kind="kill", target=member.process_id)
        if not any(self._is_sick(each, member.process_id) for each in self.troubles):
            self.monitor.record(f"{member.process_id}: left, but its device had not failed")
        trouble = Trouble(lost, loop.time() - LEAVE_S)
        self.troubles.append(trouble)
        await member.kill()
        self._succeed(member)
        await asyncio.sleep(RESTART_S)
        await self._restart(member)
        trouble.ended = loop.time()

    @staticmethod
    def _is_sick(trouble: Trouble, worker_id: str) -> bool:
        is_of_device = trouble.fault.kind in (
            *("runner_raises", "rank_killed", "rank_frozen", "gpu_faulty"),
        )
        return is_of_device and trouble.fault.target == worker_id

    async def _double(self, fault: Fault) -> None:
        """A second process starts with the target's id, without the check at a real one's start.

        Returns when one process is left.
        """
        process_id = fault.target
        await self._until_connectable()
        if not self.members[process_id].is_up or process_id in self._twins:
            return
        twin = Member(self.network, self._host(process_id.split("-")[0], process_id))
        self._twins[process_id] = twin
        await twin.start()
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        while self._twins.get(process_id) is twin:
            await asyncio.sleep(0.05)
            if loop.time() > started_at + MAX_DOUBLED_S:
                self.monitor.record(f"two processes keep the name {process_id}")
                self._leave(twin.host)

    def _leave(self, host: AnyHost) -> None:
        """The process ends because another one has its id."""
        process_id = host.process.process_id
        member, twin = self.members[process_id], self._twins.get(process_id)
        succeeded_s = asyncio.get_running_loop().time() - self._succeeded_at.get(process_id, -inf)
        if twin is None and succeeded_s > TWIN_GONE_S:  # until then it may believe in the other one
            self.monitor.record(f"{process_id}: left, but no other process has its name")
        elif twin is not None and twin.host is host:
            del self._twins[process_id]
            twin.vanish()
            return
        self._lose_clients(host)
        member.is_up = False
        member.vanish()
        self._succeed(member)

    def _succeed(self, member: Member) -> None:
        """After its death, the second process of its id, if there is one, is the first."""
        twin = self._twins.get(member.process_id)
        if twin is not None and not member.is_up:
            del self._twins[member.process_id]
            member.host, member.is_up = twin.host, True
            self._succeeded_at[member.process_id] = asyncio.get_running_loop().time()

    @staticmethod
    def _lose_clients(host: AnyHost) -> None:
        if isinstance(host, SimulatedGateway):
            for client in host.clients:
                client.lost_gateway |= client.end is None

    async def _impede(self, fault: Fault) -> None:
        member = self.members[fault.target]
        process, network = member.host.process, self.network
        if not member.is_up or process.is_frozen:
            return
        match fault.kind:
            case "freeze":
                network.freeze_process(process)
                await asyncio.sleep(fault.duration_s)
                if not process.is_dead:
                    network.thaw_process(
                        process, backlog_after_s=self._random.choice((None, 0.0001, 0.02))
                    )
            case "cut_off":
                network.cut_off(process)
                await asyncio.sleep(fault.duration_s)
                network.reconnect_later(process)
            case "slow":
                process.slowness = fault.amount
                await asyncio.sleep(fault.duration_s)
                process.slowness = 1.0
            case "wedge":
                process.wedge()
                await asyncio.sleep(fault.duration_s)
                process.unwedge()

    async def _take_nats_away(self, fault: Fault) -> None:
        network = self.network
        if network.is_away or network.is_hanging:
            return
        is_hang = fault.kind == "nats_hang"
        (network.hang if is_hang else network.stop_server)()
        await asyncio.sleep(fault.duration_s)
        (network.resume if is_hang else network.start_server)()

    async def _take_redis_away(self, fault: Fault) -> None:
        store = self.store
        if store.is_away or store.is_hanging:
            return
        if fault.kind == "redis_hang":
            store.hang()
        else:
            store.is_away = True
        await asyncio.sleep(fault.duration_s)
        store.is_away = False
        store.resume()

    def _message_fate(self, subject: str, sender: str, receiver: str) -> tuple[float, ...]:
        if any(each.target == receiver and each.other == sender for each in self._deaf):
            return ()
        if self._random.random() >= max((each.amount for each in self._noises), default=0.0):
            return (0.0,)
        kind = self._random.randrange(3)
        delay_s = self._random.choice((0.001, 0.02, 0.3)) * self._random.random()
        return ((), (delay_s,), (0.0, delay_s))[kind]

    def _frame_fate(self, sender: str, receiver: str, header: FrameHeader) -> FrameFate:
        if self._random.random() >= max((each.amount for each in self._link_noises), default=0.0):
            return HARMLESS
        match self._random.randrange(4):
            case 0:
                return FrameFate(is_corrupt=True)
            case 1:
                return FrameFate(is_truncated=True)
            case 2:
                return FrameFate(num_copies=2)
            case _:
                return FrameFate(stall_s=self._random.choice((0.1, 1.0, 12.0)))

    def given_up(self, placement_id: bytes) -> None:
        """A given-up placement samples other tokens from now on: they must not reach a client."""
        twins = [twin.host for twin in self._twins.values()]
        for worker in (*self.workers(), *twins):
            if not isinstance(worker, SimulatedWorker):
                continue
            placement = worker.decode._placements.get(placement_id) if worker.decode else None
            for sequence in placement.choices.values() if placement else ():
                if sequence.sampling is not None:
                    sequence.sampling = msgspec.structs.replace(
                        sequence.sampling, seed=sequence.sampling.seed ^ 1, temperature=1.0
                    )

    async def _until(self, when: float) -> None:
        """Waits until `when` seconds after the fleet has formed."""
        await asyncio.sleep(max(0.0, JOIN_S + when - asyncio.get_running_loop().time()))


def _max_local_prefill_tokens(seed: int) -> int:
    """Most schedulers hand off as much as possible: these prompts are so short that computing them
    on decode is cheaper. The others choose as in production.
    """
    return 4 if seed % 4 else 1_000_000


def _record(spans: list[Trouble], worker_id: str, *, has_it: bool) -> None:
    """A worker without something is in trouble, for requests that need it."""
    now = asyncio.get_running_loop().time()
    is_open = bool(spans) and spans[-1].ended == inf
    if has_it and is_open:
        spans[-1].ended = now
    elif not has_it and not is_open:
        spans.append(Trouble(Fault(at_s=now, kind="kill", target=worker_id), now))

"""The local cluster: starts and stops servers and services, provides URL and API key."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Collection
from pathlib import Path
from types import TracebackType

import msgspec

from services.local.credentials import Credential, nats_config
from services.local.hosted_models import store_models, wait_until_served
from services.local.identity import (
    ClusterIdentity,
    choose_ports,
    key_file,
    read_identity,
    read_key,
    save_identity,
    save_key,
    with_kept_passwords,
    with_other_kept,
)
from services.local.plan import (
    OPERATOR_VARIABLE,
    ROLES_WITH_PROCESS,
    SECRET_VARIABLE,
    WORKER_ROLES,
    Endpoints,
    UpOptions,
    check_options,
    expected_workers,
    offers_faults,
    plan_credentials,
    plan_services,
    plan_warming,
)
from services.local.processes.child_processes import Child, ProcessSpec, kill_children, start_child
from services.local.processes.fault_server import FaultServer
from services.local.processes.log_files import last_event
from services.local.processes.start_record import StartRecord
from services.local.readiness import wait_until_ready
from services.local.redis_acl import acl_line
from services.local.servers import (
    LOOPBACK,
    find_server,
    nats_environ,
    redis_config,
)
from services.local.state import LocalClusterState, StateDir
from services.local.supervisor import Event, Report, Supervisor
from shared.background import start_awaited
from shared.clock import Clock
from shared.errors import ConfigError, DependencyUnavailable
from shared.lifecycle.health import HEARTBEAT_INTERVAL_S
from shared.regions.region_classes import region_classes
from shared.store import StoreUnavailable
from shared.tenancy.tenant_admin import (
    KeyStanding,
    new_api_key,
    save_api_key,
    save_client,
    standing_of,
)
from shared.tls import pinned_context

START_TIMEOUT_S = 600.0  # a large checkpoint takes minutes to load
GRACE_S = 15.0
START_GRACE_S = 0.3
REDIS_LOAD_TIMEOUT_S = 120.0  # of the file of a kept cluster
LOAD_POLL_S = 0.1
PHASES = {"loading": "is loading the model", "compiling": "is compiling kernels"}  # a worker's log
OBSERVER_ID = "observer-1"
OPERATOR_ID = "operator-1"
CLIENT_ID = "client-1"


class LocalCluster:
    """A cluster on this machine. `async with` starts and stops it. Needs the main thread's event
    loop.
    """

    def __init__(
        self,
        options: UpOptions,
        clock: Clock,
        *,
        state_parent: Path,
        report: Report = lambda process_id, event, details: None,
    ) -> None:
        """Raises ConfigError for invalid options; does not start any process."""
        check_options(options)
        self._options = options
        self._clock = clock
        self._display = report
        self._nats = find_server("nats-server") if options.nats_url is None else None
        self._redis = find_server("redis-server") if options.redis_url is None else None
        if options.state_dir is None:
            self._state = StateDir.create(state_parent)
        else:
            self._state = StateDir.open(options.state_dir, state_parent)
        try:
            self._identity = self._choose_identity(state_parent)
        except BaseException:
            self._state.close(retain_logs=False)
            raise
        self._supervisor = Supervisor(clock, self._state.path, self._state.logs, self._report)
        self._faults = self._fault_server()
        self._endpoints = self._choose_endpoints()
        self._progress = StartRecord(self._state.path, self._endpoints.http_url, self._worker_ids())
        self._warming: Child | None = None
        self._has_client = False
        self.api_key = self._identity.api_key
        self.url = self._endpoints.http_url
        self.http_cert = str(Path(options.http_cert).resolve()) if options.http_cert else ""
        self.operator_token = self._endpoints.operator_token

    def _choose_identity(self, state_parent: Path) -> ClusterIdentity:
        """Returns the identity of the last start with the options of this one, or a new one, and
        keeps it for the next start. Raises ConfigError.
        """
        options = self._options
        kept = read_identity(self._state.path) or ClusterIdentity()
        own = (
            Credential("observer", OBSERVER_ID),  # used by `hearth status`
            Credential("operator", OPERATOR_ID),  # sends commands to hosts and workers
            Credential("client", CLIENT_ID),  # the tenant's, for requests over NATS
        )
        planned = with_kept_passwords((*plan_credentials(options), *own), kept.credentials)
        *credentials, self._observer, self._operator, self._client = planned
        self._credentials = tuple(credentials)
        self._key_file = None
        if options.redis_url is not None and not self._state.is_kept:
            self._key_file = key_file(state_parent, options.redis_url)
        identity = ClusterIdentity(
            api_key=options.api_key or read_key(self._key_file) or kept.api_key,
            operator_token=os.environ.get(OPERATOR_VARIABLE) or kept.operator_token,
            cluster_secret=os.environ.get(SECRET_VARIABLE) or kept.cluster_secret,
            redis_password=kept.redis_password,
            redis_passwords=kept.redis_passwords,
            credentials=with_other_kept(planned, kept.credentials) if self._nats else (),
            **choose_ports(options, kept, is_kept=self._state.is_kept),
        )
        self._keep(identity)
        return identity

    def _keep(self, identity: ClusterIdentity) -> None:
        if self._state.is_kept:
            save_identity(self._state.path, identity)

    @property
    def state_dir(self) -> Path:
        return self._state.path

    @property
    def is_kept(self) -> bool:
        """Whether the state outlives the cluster."""
        return self._state.is_kept

    @property
    def process_ids(self) -> tuple[str, ...]:
        has_process = ROLES_WITH_PROCESS - ({"worker"} if self._options.models else set())
        return tuple(each.process_id for each in self._credentials if each.role in has_process)

    @property
    def observer(self) -> tuple[str, str] | None:
        """The NATS URL and process id of a reader of heartbeats, or None with an external NATS."""
        return self._url_and_id(self._observer)

    @property
    def operator(self) -> tuple[str, str] | None:
        """The NATS URL and process id of an operator, who also commands hosts and workers, or
        None.
        """
        return self._url_and_id(self._operator)

    def _url_and_id(self, credential: Credential) -> tuple[str, str] | None:
        if self._nats is None:
            return None
        return self._endpoints.nats_url_of(credential), credential.process_id

    @property
    def tenant_id(self) -> str:
        return self._options.tenant_id

    @property
    def model_name(self) -> str:
        """The name for clients; that of the first one if there are several models."""
        if self._options.models:
            return self._options.models[0].name
        return self._options.model_name or self._options.model_dir.resolve().name

    @property
    def client_url(self) -> str | None:
        """The NATS URL of a client of the tenant, or None with an external NATS, and for a client
        that an operator has revoked.
        """
        return self._endpoints.nats_url_of(self._client) if self._has_client else None

    def pid_of(self, process_id: str) -> int:
        return self._supervisor.pid_of(process_id)

    async def __aenter__(self) -> LocalCluster:
        await self.start()
        return self

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Returns once the gateway knows every worker.

        If a process ends before that, stops all processes and raises ProcessEnded; logs remain.
        """
        failure = self._supervisor.failure
        starting = start_awaited(self._start())
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await asyncio.wait({starting, failure}, return_when=asyncio.FIRST_COMPLETED)
            if failure.done():
                failure.result()
            await starting
        except BaseException as error:
            starting.cancel()
            self._stop_warming()
            await asyncio.gather(starting, return_exceptions=True)
            await self._stop_faults()
            await self._supervisor.abandon(grace_s=START_GRACE_S)
            self._state.close(retain_logs=not isinstance(error, asyncio.CancelledError))
            if isinstance(error, TimeoutError):
                waited = f"the cluster is not ready after {START_TIMEOUT_S:g} s"
                raise DependencyUnavailable(f"{waited}; its logs: {self._state.logs}") from None
            raise
        self._supervisor.serve()

    async def stop(self) -> None:
        """Stops only the processes that this cluster started, in reverse order."""
        self._stop_warming()
        await self._stop_faults()
        await self._supervisor.stop(grace_s=GRACE_S)
        self._state.close(retain_logs=False)

    def _stop_warming(self) -> None:
        if self._warming is not None:
            kill_children([self._warming])

    def _fault_server(self) -> FaultServer | None:
        if not offers_faults(self._options):
            return None
        workers = self._worker_ids()
        return FaultServer(self._state.scratch, workers, self._supervisor.process_of, self._clock)

    def _worker_ids(self) -> list[str]:
        return [each.process_id for each in self._credentials if each.role in WORKER_ROLES]

    async def _stop_faults(self) -> None:
        if self._faults is not None:
            await self._faults.stop()

    def kill(self) -> None:
        """Kills all processes, which ends a running `stop` early."""
        self._supervisor.kill()

    async def _start(self) -> None:
        warming = plan_warming(self._options, os.environ)
        if warming is not None:
            self._warming = await start_child(warming, self._state.path, self._state.logs)
        if self._nats is not None:
            await self._supervisor.launch(self._nats_spec(self._nats))
        if self._redis is not None:
            await self._supervisor.launch(self._redis_spec(self._redis))
        await self._store_key()
        if self._faults is not None:
            await self._faults.start()
        if self._options.models:
            await store_models(
                self._endpoints.redis_url,
                self._clock,
                self._options.models,
                weights=self._options.weights,
                kv_dtype=self._options.kv_dtype,
            )
        for spec in plan_services(
            self._options,
            self._credentials,
            self._endpoints,
            num_cores=len(os.sched_getaffinity(0)),
            environ={**os.environ, "TMPDIR": str(self._state.scratch)},
        ):
            await self._supervisor.launch(spec)
        if self._options.models:
            await self._wait_for_models()
        await self._wait_until_ready()
        # Each process has received a heartbeat of each other one by then, not only the gateway: the
        # first request is placed like any later one.
        await self._clock.sleep(HEARTBEAT_INTERVAL_S)
        self._state.publish(self._description())
        self._progress.close()

    def _report(self, process_id: str, event: Event, details: str) -> None:
        if event in ("started", "ready"):
            self._progress.record(process_id, is_ready=event == "ready")
        self._display(process_id, event, details)

    async def _wait_for_models(self) -> None:
        await wait_until_served(
            self._endpoints.nats_url_of(self._operator),
            self._operator.process_id,
            self._options.models,
            self._clock,
            lambda name: self._report(name, "ready", ""),
        )

    async def _wait_until_ready(self) -> None:
        """Reports each worker as it joins, and now and then what is missing."""
        await wait_until_ready(
            self.url,
            self.operator_token,
            expected_workers(() if self._options.models else self._credentials),
            self._clock,
            trust=pinned_context(self.http_cert) if self.http_cert else None,
            on_ready=lambda process_id: self._report(process_id, "ready", ""),
            on_missing=self._report_missing,
        )
        for each in self._credentials:
            if each.role in ("gateway", "scheduler", "kv_index", "host"):
                self._report(each.process_id, "ready", "")

    def _report_missing(self, workers: Collection[str], has_answered: bool) -> None:
        for each in sorted(workers):
            phase = last_event(self._state.logs / f"{each}.log")
            doing = PHASES.get(phase, "is loading the model, or compiling kernels")
            self._report(each, "waiting", doing)
        if workers and has_answered:
            return
        for gateway in (each for each in self._credentials if each.role == "gateway"):
            doing = "is not ready, see /ready of" if has_answered else "does not answer at"
            self._report(gateway.process_id, "waiting", f"{doing} {self.url}")

    async def _store_key(self) -> None:
        """Stores the tenant's API key, unless Redis has it. A key that was revoked is replaced."""
        tenant_id, redis_url = self._options.tenant_id, self._endpoints.redis_url
        standing = await self._standing_of_key()
        if standing == "ended" and self._options.api_key:
            raise ConfigError("the key of --api-key was revoked, or has expired: give another one")
        if standing == "ended":
            self.api_key = new_api_key()
        # Kept first: no key that nobody knows is left in Redis by a crash in between.
        self._keep(msgspec.structs.replace(self._identity, api_key=self.api_key))
        if self._key_file is not None:
            save_key(self._key_file, self.api_key)
        if standing != "valid":
            await save_api_key(redis_url, self.api_key, tenant_id)
        if self._nats is not None:
            with contextlib.suppress(ConfigError):  # revoked
                await save_client(redis_url, self._client.process_id, tenant_id)
                self._has_client = True

    async def _standing_of_key(self) -> KeyStanding:
        """Raises StoreUnavailable. A Redis of this cluster reads its file first."""
        deadline = self._clock.now() + (0.0 if self._redis is None else REDIS_LOAD_TIMEOUT_S)
        while True:
            try:
                return await standing_of(
                    self._endpoints.redis_url, self.api_key, self._options.tenant_id
                )
            except StoreUnavailable:
                if self._clock.now() >= deadline:
                    raise
            await self._clock.sleep(LOAD_POLL_S)

    def _choose_endpoints(self) -> Endpoints:
        options, identity, faults = self._options, self._identity, self._faults
        own_redis = f"{LOOPBACK}:{identity.redis_port}/0"
        return Endpoints(
            nats_host=options.advertise_host,
            nats_port=identity.nats_port,
            nats_url=options.nats_url,
            redis_url=options.redis_url or f"redis://:{identity.redis_password}@{own_redis}",
            redis_urls={
                role: f"redis://{role}:{password}@{own_redis}"
                for role, password in identity.redis_passwords.items()
                if options.redis_url is None
            },
            http_host=options.http_host,
            http_port=identity.http_port,
            is_https=bool(options.http_cert),
            cluster_secret=identity.cluster_secret,
            operator_token=identity.operator_token,
            fault_socket="" if faults is None else str(faults.path),
            fault_token="" if faults is None else faults.token,
        )

    def _nats_spec(self, binary: str) -> ProcessSpec:
        host, port = self._endpoints.nats_host, self._endpoints.nats_port
        links = self._options.links
        text = nats_config(
            self._identity.credentials,
            host=host,
            port=port,
            links=links,
            classes=region_classes(self._options.region_classes),
        )
        path = self._state.write_secret("nats.conf", text)
        return ProcessSpec(
            process_id="nats",
            argv=(binary, "-c", str(path), "-P", str(self._state.path / "nats.pid")),
            environ={
                **nats_environ(os.environ, num_cores=len(os.sched_getaffinity(0))),
                **self._options.link_seeds,
            },
            listens_on=(host, port),
        )

    def _redis_spec(self, binary: str) -> ProcessSpec:
        port, password = self._identity.redis_port, self._identity.redis_password
        text = redis_config(port=port, password=password, directory=self.state_dir)
        users = (acl_line(role, each) for role, each in self._identity.redis_passwords.items())
        text += "".join(f"{each}\n" for each in users)
        path = self._state.write_secret("redis.conf", text)
        return ProcessSpec(
            process_id="redis",
            argv=(binary, str(path)),
            environ=os.environ,
            listens_on=(LOOPBACK, port),
            umask=0o077,
            inherited=(self._state.lock,),  # no other Redis writes its files while it runs
        )

    def _description(self) -> LocalClusterState:
        description = LocalClusterState(
            url=self.url,
            http_cert=self.http_cert,
            api_key=self.api_key,
            model_name=self.model_name,
            operator_token=self.operator_token,
            redis_url=self._endpoints.redis_url_of("operator"),
        )
        if self._nats is None:
            return description
        return msgspec.structs.replace(
            description,
            nats_host=self._endpoints.nats_host,
            nats_port=self._endpoints.nats_port,
            credentials=self._identity.credentials,
            links=self._options.links,
            region_classes=self._options.region_classes,
        )

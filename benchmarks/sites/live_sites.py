"""Fleets of real processes on this machine in two places: two linked sites, or two regions on one
bus. Between the places are 100 ms and 1 Gb/s, through a relay.

Each place has a prefill and a decode worker whose steps take the time of a stated device, or which
serve the demo model. The second region has workers alone: the bus, the gateway, the scheduler and
the index are in the first one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.roles.role_trace import DEVICE
from benchmarks.roles.step_costs import word_of
from benchmarks.serving.closed_loop import Target
from benchmarks.serving.cluster import SPLIT, Cluster, Process, running
from benchmarks.sites.live_kv import relayed
from services.cli.cluster.service_options import DEMO_MODEL_NAME
from shared.engine.executors.timing_executor import STATE_BYTES
from shared.subjects import CredentialRole, is_at_site
from shared.transport.link_config import SiteLink, SiteLinks
from shared.transport.nkeys import UserKey
from tests.support.cluster.service_processes import MODEL, OPERATOR, known_processes
from tests.support.relay import LinkRelay
from tests.support.servers import NatsServer, RedisServer, free_port
from tests.support.waiting import until

ONE_WAY_S, BYTES_PER_S = 0.05, 125e6
JOIN_TIMEOUT_S = 20.0
# Where the relays of decode workers' data planes listen; the workers listen on 127.0.0.1.
RELAYED = {"decode": "127.0.0.2", "decode-there": "127.0.0.3"}
LINKED_ROLES = ("gateway", "scheduler")
WORKER_ROLES: tuple[CredentialRole, ...] = ("prefill", "decode")
MAX_QUEUED = 12  # of them 4 of one tenant: what a prefill worker computes in a second
# Decode workers compute no prompts, which would stall their streams.
PREFILL_APART = {"HEARTH_MAX_LOCAL_PREFILL_TOKENS": "4"}
NUM_BLOCKS, BLOCK_SIZE, MAX_BATCH_TOKENS = 3072, 16, 2048  # as of benchmarks/roles/role_trace.py
Command = Mapping[CredentialRole, Sequence[str]]


def timing_command(role: CredentialRole) -> list[str]:
    """Returns the command of a worker that sleeps for the time of a step."""
    options = {"--max-batch-tokens": MAX_BATCH_TOKENS, "--block-size": BLOCK_SIZE}
    options["--kv-cache-bytes"] = NUM_BLOCKS * BLOCK_SIZE * STATE_BYTES
    command = ["-m", "benchmarks.serving.worker", word_of(DEVICE), role, *MODEL]
    return [*command, *(str(each) for pair in options.items() for each in pair)]


def model_command(role: CredentialRole, *, kv_cache_bytes: int) -> list[str]:
    options = ["--kv-cache-bytes", str(kv_cache_bytes), "--device", "cpu"]
    return ["-m", "services", role, *MODEL, *options]


@dataclass(frozen=True)
class LinkedSites:
    """`home` is the gateway of the first site. A cut link leaves it alone."""

    home: Target
    link: LinkRelay

    async def join(self, *, is_linked: bool) -> None:
        """Opens or cuts the link, and waits until the first site knows."""
        if is_linked:
            self.link.open()
        else:
            self.link.cut()
        async with httpx.AsyncClient(timeout=2, headers=OPERATOR, trust_env=False) as http:

            async def has_changed() -> bool:
                known = await known_processes(http, self.home.url)
                return any(map(is_at_site, known)) == is_linked

            await until(has_changed, timeout_s=JOIN_TIMEOUT_S, poll_s=0.1)


@asynccontextmanager
async def linked_sites(
    folder: Path, home: Command, other: Command, *, max_queued: int = 0
) -> AsyncIterator[LinkedSites]:
    """Runs two sites. `home` and `other` have the commands of their workers, by role. A scheduler
    queues `max_queued` requests, 0: as many as by default.
    """
    key, leaf_port = UserKey.create(), free_port()
    async with AsyncExitStack() as stack:
        link = LinkRelay(leaf_port, latency_s=ONE_WAY_S, bytes_per_s=BYTES_PER_S)
        stack.callback(link.close)
        accepts = SiteLink(peer="b", key=key.public)
        opens = SiteLink(peer="a", address=f"127.0.0.1:{link.port}", seed=key.seed)
        gateways = []
        for name, commands, near, port in (
            ("a", home, accepts, leaf_port),
            ("b", other, opens, free_port()),
        ):
            links = SiteLinks(site=name, links=(near,), port=port)
            (folder / name).mkdir()
            gateways.append(
                await stack.enter_async_context(_site(folder / name, links, commands, max_queued))
            )
        yield LinkedSites(gateways[0], link)


@asynccontextmanager
async def _site(
    folder: Path, links: SiteLinks, commands: Command, max_queued: int
) -> AsyncIterator[Target]:
    users = [(role, name) for name, role in SPLIT.items()]
    cluster = Cluster(folder, NatsServer(folder, users, links=links), RedisServer())
    async with running(cluster):
        started = {}
        for name, role in SPLIT.items():
            options = _options(role, max_queued) | (
                {"site": links.site} if role in LINKED_ROLES else {}
            )
            started[name] = cluster.start(
                role,
                name,
                command=commands.get(role, ()),
                environ=PREFILL_APART,
                options=options,
            )
        yield await _ready(cluster, started)


@asynccontextmanager
async def shared_bus(folder: Path, commands: Command, *, max_queued: int) -> AsyncIterator[Target]:
    """Runs one cluster whose second pair of workers reaches the bus through the relay, and whose KV
    crosses the link between workers of the two places.
    """
    far: dict[str, CredentialRole] = {f"{role}-there": role for role in WORKER_ROLES}
    users = [(role, name) for name, role in (SPLIT | far).items()]
    cluster = Cluster(folder, NatsServer(folder, users), RedisServer())
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running(cluster))
        bus = LinkRelay(cluster.nats.port, latency_s=ONE_WAY_S, bytes_per_s=BYTES_PER_S)
        stack.callback(bus.close)
        started = {}
        for name, role in (SPLIT | far).items():
            own = folder / name
            own.mkdir()
            advertised = {"data-plane-advertised-host": RELAYED[name]} if name in RELAYED else {}
            started[name] = cluster.start(
                role,
                name,
                command=commands.get(role, ()),
                environ={**PREFILL_APART, "TMPDIR": str(own)},  # the folder of a unix socket
                nats_port=bus.port if name in far else None,
                options=_options(role, max_queued) | advertised,
            )
        target = await _ready(cluster, started)
        for name, host in RELAYED.items():
            near = started[name.replace("decode", "prefill")]
            link = {"latency_s": ONE_WAY_S, "bytes_per_s": BYTES_PER_S}
            stack.enter_context(relayed(started[name], folder / name, host, [near], **link))
        yield target


def _options(role: CredentialRole, max_queued: int) -> dict[str, object]:
    is_limited = role == "scheduler" and max_queued > 0
    return {"max-queued-requests": max_queued} if is_limited else {}


async def _ready(cluster: Cluster, started: dict[str, Process]) -> Target:
    gateway = started["gateway"]
    others = [each for name, each in started.items() if name != "gateway"]
    await cluster.ready(gateway, *others)
    return Target(gateway.url, cluster.api_key, DEMO_MODEL_NAME)

"""A worker's side of ranks on other hosts: they ask on NATS where to join, and with which key."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from shared.config import WorkerConfig
from shared.engine.parallel.mesh_shape import MeshShape
from shared.engine.parallel.processes.join import HostListener
from shared.errors import ConfigError, InvalidRequest
from shared.messages import JoinRanks, RanksAssigned
from shared.subjects import join_ranks
from shared.transport.bus import NatsBus

log = structlog.get_logger(__name__)


@asynccontextmanager
async def listening_for_ranks(
    config: WorkerConfig, bus: NatsBus
) -> AsyncIterator[HostListener | None]:
    """Yields a listener for ranks of other hosts, or None if all ranks are this host's. Raises
    ConfigError for an address that is not this host's.
    """
    if not config.remote_ranks:
        yield None
        return
    shape = MeshShape(config.tp, config.pp)
    try:
        listener = HostListener(config.rank_host, shape, config.remote_ranks)
    except OSError as error:
        reason = f"ranks cannot join on {config.rank_host!r}: {error}"
        raise ConfigError(f"rank_host: {reason}") from error
    try:
        leave = await bus.serve(
            join_ranks(bus.process_id), JoinRanks, lambda asked: _assign(listener, asked)
        )
        log.info("waiting_for_ranks", num_ranks=config.remote_ranks)
        yield listener
        await leave()
    finally:
        listener.close()


def _assign(listener: HostListener, asked: JoinRanks) -> RanksAssigned:
    try:
        assigned = listener.assign(asked.host, asked.num_ranks)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
    log.info("ranks_assigned", host=asked.host, ranks=list(assigned.ranks))
    return RanksAssigned(
        host=listener.host,
        port=listener.port,
        key=assigned.key,
        first_rank=assigned.ranks.start,
        num_ranks=len(assigned.ranks),
        tp=listener.shape.tp,
        pp=listener.shape.pp,
    )

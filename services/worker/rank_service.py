"""`hearth rank`: the ranks of a worker on a host that is not the worker's."""

from __future__ import annotations

import asyncio
import os
import sys
from socket import gethostname

import structlog

from shared.config import RankConfig, check, is_loopback
from shared.engine.executors.group.other_host import run_host_ranks
from shared.engine.parallel.mesh_shape import MeshShape
from shared.engine.parallel.processes.watchdog import GroupLost
from shared.errors import ConfigError, HearthError, NoResponders, RequestTimeout
from shared.lifecycle.limits import forbid_core_dumps, raise_descriptor_limit
from shared.messages import JoinRanks, RanksAssigned
from shared.metrics.supervisor_notifier import Notifier, TurnNotifier
from shared.subjects import join_ranks
from shared.telemetry.line_writer import replace_standard_streams
from shared.telemetry.log import configure_service_logging
from shared.transport.bus import NatsBus

log = structlog.get_logger(__name__)

ENDED_STATUS = 3  # exit status of the process: a supervisor starts it again, as it does the worker
ERROR_STATUS = 2
REPLY_S, PAUSE_S = 5.0, 0.5


def run_rank(config: RankConfig) -> int:
    """Joins the worker as soon as it waits for ranks, and returns when their group has ended: 3,
    or 2 after a HearthError.
    """
    replace_standard_streams()
    configure_service_logging(
        config.process_id, level=config.log_level, log_format=config.log_format
    )
    raise_descriptor_limit()
    forbid_core_dumps()
    try:
        check(config)
        assigned = asyncio.run(_assigned(config))
        ranks = range(assigned.first_rank, assigned.first_rank + assigned.num_ranks)
        if not config.is_trusted_network and not is_loopback(assigned.host):
            raise ConfigError(
                f"the worker is at {assigned.host}: its ranks send activations and KV without "
                "encryption; give --trusted-network if every host of that network may read them"
            )
        log.info("ranks_join", worker=config.leader_id, ranks=list(ranks))
        run_host_ranks(
            (assigned.host, assigned.port),
            assigned.key,
            gethostname(),
            ranks,
            MeshShape(assigned.tp, assigned.pp),
            model_dir=config.model_dir,
            num_threads=config.num_threads,
            on_turn=TurnNotifier(Notifier.of_environ(os.environ)),
        )
    except GroupLost as error:
        log.warning("rank_group_ended", reason=str(error))
        print(f"{config.process_id}: {error}", file=sys.stderr, flush=True)
        return ENDED_STATUS
    except HearthError as error:
        print(f"{config.process_id}: {error.message}", file=sys.stderr, flush=True)
        return ERROR_STATUS


async def _assigned(config: RankConfig) -> RanksAssigned:
    """Requests ranks until the worker replies. Raises InvalidRequest if it misses fewer ranks."""
    bus = await NatsBus.connect(
        config.nats_url,
        process_id=config.process_id,
        tls=config.nats_tls,
        tls_first=config.is_nats_tls_first,
    )
    asked = JoinRanks(host=gethostname(), num_ranks=config.ranks)
    try:
        while True:
            try:
                subject = join_ranks(config.leader_id)
                return await bus.request(subject, asked, RanksAssigned, timeout_s=REPLY_S)
            except (NoResponders, RequestTimeout):
                await asyncio.sleep(PAUSE_S)
    finally:
        await bus.close()

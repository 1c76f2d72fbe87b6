"""Starts what a gateway is made of."""

from __future__ import annotations

import asyncio

import structlog

from services.gateway.models.checked_model import checked_model
from services.gateway.models.model_check import CheckedModel
from services.gateway.preparation.preparation_pool import PreparationPool
from services.gateway.processes import grammar_pool, preparation_pool
from services.gateway.service import GatewayService
from shared.clock import MonotonicClock
from shared.config import GatewayConfig, check, redis_tls_of
from shared.lifecycle.identity import connect, connect_to_clients
from shared.randomness import SystemRandomness
from shared.store import RedisStore

log = structlog.get_logger(__name__)

PREFIX_STORE_TIMEOUT_S = 2.0


async def build_gateway(config: GatewayConfig) -> GatewayService:
    """Raises ConfigError for a bad configuration or model directory, and NatsBus.connect errors."""
    check(config)
    if not config.cluster_secret:
        log.warning("cluster_secret_missing", effect="workers can compute the root of any tenant")
    own = None
    if config.model_dir is not None:
        given = (config.model_dir, config.response_template, config.tool_format)
        own = await asyncio.to_thread(checked_model, *given)
    pool, check_pool = preparation_pool(config, own), grammar_pool(config, own)
    await asyncio.gather(pool.start(), check_pool.start())
    gateway = await connected_gateway(config, own, pool=pool, check_pool=check_pool)
    await gateway.load_tokenizer()
    return gateway


async def connected_gateway(
    config: GatewayConfig,
    own: CheckedModel | None,
    *,
    pool: PreparationPool,
    check_pool: PreparationPool,
) -> GatewayService:
    """Connects to NATS and Redis. The gateway closes the pools. Raises NatsBus.connect errors."""
    clock = MonotonicClock()
    bus = await connect(config, "gateway")
    tls = redis_tls_of(config)
    store = RedisStore(config.redis_url, clock, tls=tls)
    replica = RedisStore(config.redis_read_url, clock, tls=tls) if config.redis_read_url else None
    # Prefixes may be long, and stored responses longer: their slow replies must not trip the
    # breaker of the API key lookups, or that of each other.
    prefix_redis, bulk_redis = (
        RedisStore(config.redis_url, clock, timeout_s=PREFIX_STORE_TIMEOUT_S, tls=tls)
        for _ in range(2)
    )
    return GatewayService(
        config,
        bus,
        store,
        own,
        clock=clock,
        randomness=SystemRandomness(),
        pool=pool,
        check_pool=check_pool,
        prefix_redis=prefix_redis,
        bulk_redis=bulk_redis,
        redis_replica=replica,
        clients=await connect_to_clients(config),
    )

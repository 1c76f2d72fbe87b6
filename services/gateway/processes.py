"""The processes of a gateway that prepare requests, and those that check grammars."""

from __future__ import annotations

from services.gateway.models.encoding_pools import EncodingPools
from services.gateway.models.model_check import CheckedModel
from services.gateway.models.served_text import process_setup
from services.gateway.observability.metrics.preparation import PoolLoad
from services.gateway.preparation.preparation_pool import PreparationPool
from services.gateway.structured.grammars.checks import CHECK_NICENESS, CHECK_PROCESS, MAX_WAIT_S
from services.gateway.text.process_jobs import ProcessSetup
from shared.config import GatewayConfig

PREPARATION_PROCESS = "services.gateway.dialects.preparation_process"


def preparation_pool(config: GatewayConfig, own: CheckedModel | None) -> PreparationPool:
    return PreparationPool(_setup(config, own), module=PREPARATION_PROCESS)


def grammar_pool(config: GatewayConfig, own: CheckedModel | None) -> PreparationPool:
    return PreparationPool(
        _setup(config, own),
        module=CHECK_PROCESS,
        max_wait_s=MAX_WAIT_S,
        niceness=CHECK_NICENESS,
        grows=True,
    )


def preparation_loads(**pools: PreparationPool | EncodingPools) -> dict[str, PoolLoad]:
    return {
        name: PoolLoad(each.num_waiting, each.num_running, each.num_lost)
        for name, each in pools.items()
    }


def _setup(config: GatewayConfig, own: CheckedModel | None) -> ProcessSetup | None:
    return None if own is None else process_setup(own, config.tool_format)

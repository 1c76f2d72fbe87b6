"""The gateway's own model, and the processes that prepare requests and check grammars."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Self

from services.gateway.models.checked_model import checked_model
from services.gateway.models.model_check import CheckedModel
from services.gateway.models.served_text import process_setup
from services.gateway.preparation.preparation_pool import PreparationPool
from services.gateway.structured.grammars.checks import CHECK_NICENESS, CHECK_PROCESS, MAX_WAIT_S
from shared.config import GatewayConfig

PREPARATION_PROCESS = "services.gateway.dialects.preparation_process"


@dataclass(frozen=True, slots=True)
class PreparationPools:
    """`own`: the gateway's own model, or None. `requests`: renders templates and prepares large
    bodies. `grammars`: checks grammars.
    """

    own: CheckedModel | None
    requests: PreparationPool
    grammars: PreparationPool

    @classmethod
    def of(cls, config: GatewayConfig, own: CheckedModel | None) -> Self:
        setup = None if own is None else process_setup(own, config.tool_format)
        return cls(
            own,
            PreparationPool(setup, module=PREPARATION_PROCESS),
            PreparationPool(
                setup,
                module=CHECK_PROCESS,
                max_wait_s=MAX_WAIT_S,
                niceness=CHECK_NICENESS,
                grows=True,
            ),
        )

    @classmethod
    async def started(cls, config: GatewayConfig) -> Self:
        """Reads the gateway's own model and starts the processes. Raises ConfigError for a bad
        model directory.
        """
        own = None
        if config.model_dir is not None:
            given = (config.model_dir, config.response_template, config.tool_format)
            own = await asyncio.to_thread(checked_model, *given, config.chat_template)
        pools = cls.of(config, own)
        await asyncio.gather(pools.requests.start(), pools.grammars.start())
        return pools

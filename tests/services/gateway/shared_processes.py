"""Processes that the gateways of a test run share: a gateway starts four, of 0.4 s of CPU each."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from services.gateway.dialects.dialect import Dialect
from services.gateway.dialects.dialect_table import DIALECTS
from services.gateway.models.checked_model import checked_model
from services.gateway.models.encoding_pools import ENCODING_PROCESS
from services.gateway.models.preparation_pools import PREPARATION_PROCESS, PreparationPools
from services.gateway.models.served_text import process_setup
from services.gateway.preparation.preparation_pool import PreparationPool
from services.gateway.service import GatewayService, build_gateway, connected_gateway
from services.gateway.structured.grammars.checks import CHECK_NICENESS, CHECK_PROCESS
from shared.config import GatewayConfig


class SharedPool(PreparationPool):
    """A gateway that stops does not end its processes."""

    async def close(self) -> None:
        pass

    async def end(self) -> None:
        await super().close()


@dataclass
class ModelProcesses:
    """Of one model. `encoding`: tokenizes its prompts."""

    pools: PreparationPools
    encoding: SharedPool

    @classmethod
    async def started(cls, config: GatewayConfig) -> ModelProcesses:
        assert config.model_dir is not None
        given = (config.model_dir, config.response_template, config.tool_format)
        own = await asyncio.to_thread(checked_model, *given)
        new = partial(SharedPool, process_setup(own, config.tool_format))
        return cls(
            PreparationPools(
                own,
                new(module=PREPARATION_PROCESS),
                new(module=CHECK_PROCESS, niceness=CHECK_NICENESS, grows=True),
            ),
            SharedPool(None, num_processes=1, module=ENCODING_PROCESS, is_costly=True),
        )

    async def end(self) -> None:
        for each in (self.pools.requests, self.pools.grammars, self.encoding):
            assert isinstance(each, SharedPool)
            await each.end()


class SharedProcesses:
    """Of gateways with a model in one of `model_dirs`, on one event loop."""

    def __init__(self) -> None:
        self.model_dirs: set[Path | None] = set()
        self._found: dict[tuple[object, ...], ModelProcesses] = {}

    async def gateway(
        self, config: GatewayConfig, dialects: Sequence[Dialect] = DIALECTS
    ) -> GatewayService:
        if config.model_dir not in self.model_dirs:
            return await build_gateway(config)
        key = config.model_dir, config.response_template, config.tool_format
        if key not in self._found:
            self._found[key] = await ModelProcesses.started(config)
        found = self._found[key]
        gateway = await connected_gateway(config, found.pools, dialects)
        assert gateway._models.own is not None
        gateway._models.own.renderer._encoding = found.encoding
        return gateway

    async def close(self) -> None:
        while self._found:
            await self._found.popitem()[1].end()

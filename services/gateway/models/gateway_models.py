"""Composes the models of a gateway: live cards, the registry, loaded texts, names of tenants."""

from __future__ import annotations

from contextlib import suppress

from services.gateway.models.encoding_pools import EncodingPools
from services.gateway.models.live_models import Catalog
from services.gateway.models.loaded_texts import LoadedTexts
from services.gateway.models.model_names import ModelNames
from services.gateway.models.preparation_pools import PreparationPools
from services.gateway.models.served_models import ServedModels
from services.gateway.models.served_text import TextLoader, process_setup
from services.gateway.preparation.preparation_pool import PreparationPool
from services.gateway.structured.grammars.checks import GrammarChecks
from services.gateway.tenancy.model_aliases import ModelAliases
from services.gateway.tenancy.stores import GatewayStores
from shared.clock import Clock
from shared.config import GatewayConfig
from shared.lifecycle.health import Fleet
from shared.model_registry.reader import RegistryReader
from shared.randomness import Randomness
from shared.store import StoreUnavailable


class GatewayModels:
    """`own`: the text of the gateway's own model, or None. `close` ends the pools."""

    def __init__(
        self,
        config: GatewayConfig,
        pools: PreparationPools,
        fleet: Fleet,
        stores: GatewayStores,
        *,
        clock: Clock,
        randomness: Randomness,
    ) -> None:
        self.pools, own = pools, pools.own
        self.checks = GrammarChecks(pools.grammars)
        is_cold_started = config.cold_start_s > 0
        self.live = Catalog(fleet, config.served_name, clock, is_cold_started=is_cold_started)
        loader = TextLoader(pools.requests, self.checks, tool_format=config.tool_format)
        self.encoding = loader.encoding
        self.texts = LoadedTexts(loader.load, clock, max_loaded=config.max_loaded_models)
        setup = None if own is None else process_setup(own, config.tool_format)
        self.own = None if own is None or setup is None else loader.text(own, setup)
        self.registry = RegistryReader(stores.slow, clock)
        self.served = ServedModels(self.live, self.own, self.registry, self.texts, randomness)
        self.aliases = ModelAliases(stores.fast, clock, is_native=self.served.has)
        self.names = ModelNames(self.served, self.aliases)

    @property
    def num_loaded(self) -> int:
        """The number of loaded tokenizers and templates, the gateway's own model included."""
        return len(self.texts) + (self.own is not None)

    @property
    def loads(self) -> dict[str, PreparationPool | EncodingPools]:
        """The pools whose load the metrics export, by their names there."""
        pools = self.pools
        return {"requests": pools.requests, "prompts": self.encoding, "grammars": pools.grammars}

    async def read_registry(self) -> None:
        """Reads the registry once. Does nothing without Redis, since `registry.run` polls it."""
        with suppress(StoreUnavailable):
            await self.registry.refresh()

    async def load_tokenizer(self) -> None:
        """Loads the tokenizer of the gateway's own model, so that no prompt waits for it."""
        if self.own is not None:
            await self.own.renderer.load_tokenizer()

    async def close(self) -> None:
        await self.pools.requests.close()
        await self.checks.close()
        await self.texts.close()
        if self.own is not None:
            await self.own.renderer.close()

"""All that a gateway knows of models: live cards, the registry, loaded texts, names of tenants."""

from __future__ import annotations

from services.gateway.models.live_models import Catalog
from services.gateway.models.loaded_texts import LoadedTexts
from services.gateway.models.model_check import CheckedModel
from services.gateway.models.model_names import ModelNames
from services.gateway.models.served_models import ServedModels
from services.gateway.models.served_text import TextLoader, process_setup
from services.gateway.preparation.preparation_pool import PreparationPool
from services.gateway.structured.grammars.checks import GrammarChecks
from services.gateway.tenancy.model_aliases import ModelAliases
from shared.clock import Clock
from shared.config import GatewayConfig
from shared.lifecycle.health import Fleet
from shared.model_registry.reader import RegistryReader
from shared.randomness import Randomness
from shared.store import Store


class GatewayModels:
    """`own`: the gateway's own model; None: it has none. `slow_store`: outside the request path."""

    def __init__(
        self,
        config: GatewayConfig,
        own: CheckedModel | None,
        fleet: Fleet,
        store: Store,
        slow_store: Store,
        *,
        pool: PreparationPool,
        check_pool: PreparationPool,
        clock: Clock,
        randomness: Randomness,
    ) -> None:
        self.checks = GrammarChecks(check_pool)
        self.live = Catalog(fleet, config.served_name, clock)
        loader = TextLoader(pool, self.checks, tool_format=config.tool_format)
        self.encoding = loader.encoding
        self.texts = LoadedTexts(loader.load, clock, max_loaded=config.max_loaded_models)
        setup = None if own is None else process_setup(own, config.tool_format)
        self.own = None if own is None or setup is None else loader.text(own, setup)
        self.registry = RegistryReader(slow_store, clock)
        self.served = ServedModels(self.live, self.own, self.registry, self.texts, randomness)
        self.aliases = ModelAliases(store, clock, is_native=self.served.has)
        self.names = ModelNames(self.served, self.aliases)

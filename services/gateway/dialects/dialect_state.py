"""What dialects keep between requests: named prefixes, stored responses, and keys of seals."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from services.gateway.dialects.anthropic.dialect import MESSAGES
from services.gateway.dialects.anthropic.signature import signing_state
from services.gateway.dialects.prefixes.prefix_tokenizer import PrefixTokenizer
from services.gateway.dialects.prefixes.public_prefix_watcher import PublicPrefixWatcher
from services.gateway.dialects.prefixes.store import PrefixStore
from services.gateway.dialects.responses.dialect import CREATE
from services.gateway.dialects.responses.storage.completion import BodyCompletion
from services.gateway.dialects.responses.storage.seal import Seal
from services.gateway.dialects.responses.storage.store import ResponseStore
from services.gateway.dialects.workers_ai.dialect import RUN, RunState
from services.gateway.models.served_models import ServedModels
from services.gateway.models.served_text import ServedModel
from services.gateway.request.endpoint import EndpointState
from services.gateway.request.preparer import Preparer
from services.gateway.request.public_prefixes import PublicPrefixes
from services.gateway.tenancy.redis_memory import RedisMemory
from shared.block_hash import root_key
from shared.clock import Clock
from shared.config import GatewayConfig
from shared.lifecycle.heartbeat import HealthMonitor
from shared.randomness import Randomness
from shared.store import Store


class DialectState:
    """`endpoints`: the states of endpoints that have one, by name. `store`: outside the request
    path; `bulk`: for replies of megabytes. `count_response`: called with the outcome of a record.
    """

    def __init__(
        self,
        config: GatewayConfig,
        store: Store,
        bulk: Store,
        memory: RedisMemory,
        *,
        public: PublicPrefixes,
        preparer: Preparer,
        models: ServedModels,
        health_monitor: HealthMonitor,
        clock: Clock,
        wall_clock: Callable[[], float],
        randomness: Randomness,
        max_payload_bytes: Callable[[], int],
        count_response: Callable[[str], None],
    ) -> None:
        self._preparer = preparer
        self._max_payload_bytes = max_payload_bytes
        key = root_key(config.cluster_secret)
        self.prefixes = PrefixStore(
            store,
            health_monitor=health_monitor,
            models=models,
            reader_of=self._prefix_tokenizer,
            wall_clock=wall_clock,
            max_all_bytes=lambda: memory.max_prefix_bytes,
            region=config.region,
            root_key=key,
        )
        self.public_watcher = PublicPrefixWatcher(
            public,
            store,
            clock,
            models=models,
            reader_of=self._prefix_tokenizer,
            wall_clock=wall_clock,
        )
        self.responses = ResponseStore(
            store,
            clock,
            region=config.region,
            now=wall_clock,
            count=count_response,
            ttl_s=config.response_ttl_s,
            max_all_bytes=lambda: memory.max_response_bytes,
            bulk=bulk,
        )
        seal = Seal(config.cluster_secret, randomness.bytes) if config.cluster_secret else None
        run_state = RunState(randomness.bytes if config.padding else None)
        completion = BodyCompletion(self.responses, seal, config.max_body_bytes)
        self.endpoints: dict[str, EndpointState] = {
            MESSAGES.name: signing_state(key),
            CREATE.name: completion.state,
            RUN.name: EndpointState(lambda _: run_state),
        }

    def _prefix_tokenizer(self, model: ServedModel) -> PrefixTokenizer:
        return PrefixTokenizer(
            partial(self._preparer.tokenize, model.text),
            self._max_payload_bytes,
            model.text.files.longest_token_chars,
        )

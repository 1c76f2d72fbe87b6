"""Polls Redis for changes of the public prefixes, outside the request path."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from services.gateway.dialects.prefixes.prefix_tokenizer import PrefixTokenizer
from services.gateway.models.served_models import ServedModels
from services.gateway.models.served_text import ServedModel
from shared.background import item_error
from shared.block_hash import PUBLIC_TENANT_ID
from shared.clock import Clock
from shared.errors import HearthError, InvalidRequest
from shared.store import Store, StoreUnavailable
from shared.tenancy.prefixes import pinned_prefix
from shared.tenancy.prefixes.pinned_prefix import PinnedPrefix, TooManyPrefixes
from shared.tenancy.prefixes.public_prefixes import PublicPrefixes

log = structlog.get_logger(__name__)

POLL_INTERVAL_S = 1.0  # delay until a gateway uses a new prefix


class PublicPrefixWatcher:
    def __init__(
        self,
        public: PublicPrefixes,
        store: Store,
        clock: Clock,
        *,
        models: ServedModels,
        reader_of: Callable[[ServedModel], PrefixTokenizer],
        wall_clock: Callable[[], float],
    ) -> None:
        self._public = public
        self._store = store
        self._clock = clock
        self._models = models
        self._reader_of = reader_of
        self._wall_clock = wall_clock
        self._version = -1  # the version that was read last
        self._names: frozenset[str] = frozenset()  # the names of the models at that read
        self._is_complete = False
        self._failed: set[str] = set()  # digests of prefixes whose errors are in the log

    async def run(self) -> None:
        """Runs forever. Retains the current prefixes while Redis is unavailable."""
        while True:
            try:
                await self._poll()
            except HearthError as error:
                log.debug("public_prefixes_read_failed", reason=error.message)
            except BaseException as raised:  # an operator's record may raise anything
                item_error(raised)
                log.exception("public_prefixes_read_failed")
            await self._clock.sleep(POLL_INTERVAL_S)

    async def _poll(self) -> None:
        changes = await pinned_prefix.changes(self._store, self._version)
        names = frozenset(self._models.names)
        is_changed = changes.tenants is None or PUBLIC_TENANT_ID in changes.tenants
        if self._is_complete and names == self._names and not is_changed:
            self._version = changes.version
            return
        prefixes, is_complete = [], True
        for name, entry in (await pinned_prefix.entries(self._store, PUBLIC_TENANT_ID)).items():
            if self._models.serves(entry.model):
                prefix = await pinned_prefix.load(self._store, PUBLIC_TENANT_ID, name)
                if prefix is not None:
                    read = await self._read_alone(prefix, entry.digest)
                    is_complete = is_complete and read is not None
                    prefixes.append(prefix if read is None else read)
        self._public.replace(prefix for prefix in prefixes if prefix.token_ids)
        self._version, self._names, self._is_complete = changes.version, names, is_complete

    async def _read_alone(self, prefix: PinnedPrefix, digest: str) -> PinnedPrefix | None:
        """Returns None if the read fails: the next poll repeats it, and other prefixes do not wait
        for it. Raises StoreUnavailable.
        """
        try:
            return await self._read_public(prefix, digest)
        except StoreUnavailable:
            raise
        except HearthError as error:  # for example, nothing can serve the model yet
            log.debug("public_prefix_failed", name=prefix.name, reason=error.message)
        except BaseException as raised:
            self._log_once(prefix, item_error(raised))
        return None

    def _log_once(self, prefix: PinnedPrefix, error: Exception) -> None:
        """Logs the error of a prefix once: the prefix may be read each second while this process
        lives.
        """
        if prefix.digest not in self._failed:
            self._failed.add(prefix.digest)
            log.error("public_prefix_failed", name=prefix.name, exc_info=error)

    async def _read_public(self, prefix: PinnedPrefix, digest: str) -> PinnedPrefix:
        """Returns the prefix with its tokens. The operator stores the text; the first gateway that
        serves the model adds the tokens, unless the record, which had this digest, has been changed
        or deleted since: the next poll reads the change.
        """
        if prefix.token_ids:
            return prefix
        try:
            model = await self._models.main(prefix.model)
            read = await self._reader_of(model).read(prefix, model.card)
            now = self._wall_clock()
            await pinned_prefix.save(self._store, read, now, replaces=digest)
        except (InvalidRequest, TooManyPrefixes) as error:
            log.warning("public_prefix_refused", name=prefix.name, error=error.message)
            return prefix
        return read

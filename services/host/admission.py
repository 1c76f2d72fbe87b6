"""A worker that has started: whether it serves what the model registry names, and what it takes."""

from __future__ import annotations

import asyncio

import msgspec
import structlog

from services.host.hosted_revisions import HostedRevision
from services.host.model_states import HostStates
from services.host.records import ModelRecord, Records
from services.host.workers.process_memory import process_bytes
from shared.clock import Clock
from shared.errors import ConfigError
from shared.messages import Heartbeat, ModelCard
from shared.model_registry.admin import RegistryAdmin
from shared.store import StoreUnavailable

log = structlog.get_logger(__name__)

RETRY_S = 1.0  # while Redis is away
SOURCE_CHANGED = "its source has changed since it was added"
KNOWN_WAKE_S = 0.3  # expected before the first wake


class HostAdmission:
    def __init__(
        self, states: HostStates, admin: RegistryAdmin, records: Records, clock: Clock
    ) -> None:
        self._states = states
        self._admin = admin
        self._records = records
        self._clock = clock

    def put(self, hosted: HostedRevision) -> None:
        """Adds a model to the states, with what its record says of it."""
        assert hosted.source is not None
        record = hosted.record
        budget = max(self._states.budgets.values())
        measured = None if record is None else record.process_bytes
        self._states.put(
            hosted.source.memory(hosted.key, hosted.model, budget, measured),
            self._clock.now(),
            is_known=record is not None,
            wake_s=None if record is None else record.wake_s,
            start_s=None if record is None else record.start_s,
        )

    def check(self, hosted: HostedRevision) -> bool:
        """Returns False, and fails the model, if its content is not what the model registry has
        recorded.
        """
        found, recorded = hosted.card, hosted.revision.digest
        if found is None or recorded in ("", found.revision):
            return True
        if hosted.record is not None and not hosted.is_admitted:
            hosted.record = None  # it is of an earlier start: the next one measures it again
            return True
        self._fail(hosted, found.revision, recorded)
        return False

    async def admit(self, hosted: HostedRevision, message: Heartbeat) -> None:
        """Reads the first heartbeat of a worker that has loaded its model."""
        card, state, now = message.model, self._states.find(hosted.key), self._clock.now()
        if card is None or state is None or hosted.worker_id != message.process_id:
            return
        took_s = now - hosted.started_at
        kv_bytes = state.kv_bytes
        measured = None  # the kernel counts the host's memory alone
        if state.device == "cpu":
            measured = await asyncio.to_thread(process_bytes, hosted.pid, kv_bytes)
        hosted.record = self._record(hosted, card, measured, took_s, is_hot=kv_bytes > 0)
        if not self.check(hosted):
            return
        self._records.write(hosted.record)
        self.put(hosted)
        if message.state == "ready":
            self._states.hot(hosted.key, now)
        else:
            self._states.standby(hosted.key, now)
        log.info("worker_ready", worker=message.process_id, state=message.state, took_s=took_s)
        if not hosted.revision.digest:
            await self._record_digest(hosted, card)

    def measured_wake(self, hosted: HostedRevision, wake_s: float) -> None:
        if hosted.record is not None:
            start_s = hosted.record.start_s - hosted.record.wake_s + wake_s
            hosted.record = msgspec.structs.replace(
                hosted.record, wake_s=wake_s, start_s=max(wake_s, start_s)
            )
            self._records.write(hosted.record)
            self.put(hosted)

    def _record(
        self,
        hosted: HostedRevision,
        card: ModelCard,
        measured: int | None,
        took_s: float,
        *,
        is_hot: bool,
    ) -> ModelRecord:
        assert hosted.source is not None
        wake_s = KNOWN_WAKE_S if hosted.record is None else hosted.record.wake_s
        planned = hosted.source.process_bytes
        return ModelRecord(
            key=hosted.key,
            source=hosted.revision.source,
            max_context_tokens=hosted.source.max_context_tokens,
            card=card,
            process_bytes=planned if measured is None else measured,
            start_s=took_s if is_hot else took_s + wake_s,
            wake_s=wake_s,
        )

    async def _record_digest(self, hosted: HostedRevision, card: ModelCard) -> None:
        """Records the weights' digest in the registry, as the first host that loads the source."""
        while True:
            try:
                stored = await self._admin.record_digest(
                    *hosted.key, card.revision, source=hosted.revision.source
                )
            except StoreUnavailable:
                await self._clock.sleep(RETRY_S)
            except ConfigError as error:  # removed or changed meanwhile
                log.warning("digest_not_recorded", model=str(hosted.key), reason=error.message)
                return
            else:
                if stored != card.revision:
                    self._fail(hosted, card.revision, stored)
                return

    def _fail(self, hosted: HostedRevision, found: str, recorded: str) -> None:
        reason = (
            f"source {hosted.revision.source!r} of model {hosted.key} has the digest {found}, and "
            f"the catalogue has recorded {recorded}: restore it, or add it as a new revision"
        )
        log.error("digest_mismatch", model=str(hosted.key), found=found, recorded=recorded)
        self._states.fail(hosted.key, reason, SOURCE_CHANGED, self._clock.now())

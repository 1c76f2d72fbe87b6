"""The revisions of the registry on this host: where their weights are, and what is known of them.

A source is looked for in the background, since it may have to be downloaded. One that is not found
is looked for again, after twice the pause each time: a directory may appear later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec
import structlog

from services.host.budget import ModelKey
from services.host.records import ModelRecord
from services.host.source_process import SourceFinder
from services.host.sources import ModelSource
from shared.background import Background, is_logged, item_error
from shared.clock import Clock
from shared.errors import HearthError
from shared.messages import ModelCard, WorkerLoad
from shared.model_registry.record import RegisteredModel, RegisteredRevision

log = structlog.get_logger(__name__)

RETRY_S, MAX_RETRY_S = 10.0, 60.0


@dataclass(eq=False)
class HostedRevision:
    """A revision of the registry on this host.

    `worker_id` and `pid` are those of its process, which began at `started_at`, or None and 0
    without one. If `is_admitted`, its worker has been checked. `search` looks for its source, which
    may be a download. If `is_gone`, the registry has it no longer, and its worker ends.
    """

    key: ModelKey
    model: RegisteredModel
    revision: RegisteredRevision
    source: ModelSource | None = None
    search: asyncio.Task[None] | None = None
    failure: str = ""
    record: ModelRecord | None = None
    worker_id: str | None = None
    pid: int = 0
    started_at: float = 0.0
    is_admitted: bool = False
    is_gone: bool = False
    silent_since: float | None = None
    load: WorkerLoad | None = None
    parking: asyncio.Future[None] | None = None
    commands: asyncio.Lock = field(default_factory=asyncio.Lock)  # a worker gets one at a time

    @property
    def card(self) -> ModelCard | None:
        return None if self.record is None else self.record.card

    @property
    def digest(self) -> str:
        """The digest of the weights; empty while it is unknown."""
        return self.revision.digest or ("" if self.card is None else self.card.revision)

    def is_called(self, name: str, revision: str) -> bool:
        """Whether the revision has this name in the model registry, or this digest of
        its weights.
        """
        return self.key.name == name and revision in (self.key.revision, self.digest)


class HostedRevisions:
    """The revisions of the registry on this host. Calls `on_found` once the source of a
    revision is known.
    """

    def __init__(
        self, clock: Clock, device: str, on_found: Callable[[HostedRevision], None]
    ) -> None:
        self.revisions: dict[ModelKey, HostedRevision] = {}
        self._clock = clock
        self._finder = SourceFinder(device)
        self._on_found = on_found
        self._searches = Background()
        self._turn = asyncio.Lock()

    def named(self, name: str, revision: str) -> HostedRevision | None:
        found = (each for each in self.revisions.values() if each.is_called(name, revision))
        return next(found, None)

    def update(
        self, models: Mapping[str, RegisteredModel]
    ) -> tuple[list[HostedRevision], list[HostedRevision]]:
        """Returns the revisions that changed beyond their digests or are back, and those that have
        gone, or come from another source now: call again once their workers have ended.
        """
        wanted = {ModelKey(model.name, each.name): (model, each) for model, each in _all(models)}
        changed, gone = [], []
        for key, hosted in self.revisions.items():
            model, revision = wanted.get(key, (hosted.model, None))
            was_gone = hosted.is_gone
            hosted.is_gone = revision is None or _is_another(hosted, model, revision)
            if revision is None or hosted.is_gone:
                gone.append(hosted)
                continue
            if was_gone or _without_digests(hosted.model) != _without_digests(model):
                changed.append(hosted)
            hosted.model, hosted.revision = model, revision
        for key, (model, revision) in wanted.items():
            if key not in self.revisions:
                hosted = self.revisions[key] = HostedRevision(key, model, revision)
                hosted.search = self._searches.start_item(self._search(hosted), is_logged)
        return changed, gone

    def forget(self, hosted: HostedRevision) -> None:
        del self.revisions[hosted.key]
        if hosted.search is not None:
            hosted.search.cancel()

    async def stop(self) -> None:
        await self._searches.stop()

    async def _search(self, hosted: HostedRevision) -> None:
        pause_s = RETRY_S
        while self.revisions.get(hosted.key) is hosted:
            async with self._turn:  # starts of downloads hold up the event loop: one at a time
                await asyncio.sleep(0)
            try:
                hosted.source = await self._finder.find(hosted.model, hosted.revision)
                self._on_found(hosted)
            except BaseException as raised:  # a hub or a folder: the failure of this model alone
                error = item_error(raised)
                hosted.source = None
                self._fail(hosted, error)
                await self._clock.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_RETRY_S)
            else:
                hosted.failure = ""
                return

    def _fail(self, hosted: HostedRevision, error: Exception) -> None:
        reason = error.message if isinstance(error, HearthError) else repr(error)
        if hosted.failure != reason:
            log.error("source_not_found", model=str(hosted.key), reason=reason)
        hosted.failure = reason


def _all(
    models: Mapping[str, RegisteredModel],
) -> Iterator[tuple[RegisteredModel, RegisteredRevision]]:
    return ((model, revision) for model in models.values() for revision in model.revisions)


def _is_another(
    hosted: HostedRevision, model: RegisteredModel, revision: RegisteredRevision
) -> bool:
    """Whether a worker of it would have other options."""

    def options(model: RegisteredModel, revision: RegisteredRevision) -> tuple[object, ...]:
        return revision.source, model.max_context_tokens, model.weights, model.kv_dtype

    return options(hosted.model, hosted.revision) != options(model, revision)


def _without_digests(model: RegisteredModel) -> RegisteredModel:
    revisions = tuple(msgspec.structs.replace(each, digest="") for each in model.revisions)
    return msgspec.structs.replace(model, revisions=revisions)

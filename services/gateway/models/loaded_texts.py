"""The texts of the catalogue's models that are loaded: those that were used last, and those in use.

    unknown ──first request──▶ loading, on a thread ──▶ loaded ──others used since──▶ unknown
                                   └──▶ failed: refused for RETRY_S, then loaded again

Concurrent requests share one load. A text stays alive as long as a request holds it, and is found
again until then: none is loaded twice because it was pushed out while it was in use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple
from weakref import WeakValueDictionary

import structlog

from services.gateway.models.served_text import ServedText
from services.gateway.preparation.recently_used import RecentlyUsed
from shared.background import item_error, start_awaited
from shared.clock import Clock
from shared.errors import NoCapacity
from shared.transport.decoding.struct_types import examine_struct_types
from shared.transport.wire_errors import one_line

log = structlog.get_logger(__name__)

RETRY_S = 5.0  # after a failure
PAUSE_FACTOR = 10  # times the duration of the load, if this is longer
MAX_PAUSE_S = 300.0
MAX_WAIT_S = 30.0
NUM_THREADS = 4  # a source that hangs, such as one on a lost network drive, delays no other


class TextSource(NamedTuple):
    """`digest`: of the weights, since another revision may replace the files of a directory."""

    place: str
    digest: str


class LoadedTexts:
    def __init__(
        self,
        load: Callable[[str], ServedText],
        clock: Clock,
        *,
        max_loaded: int,
        max_wait_s: float = MAX_WAIT_S,
    ) -> None:
        """`load`: reads the files of a source on a thread. `max_loaded`: texts to retain besides
        those in use. `max_wait_s`: a request does not wait longer for a load.
        """
        self.max_wait_s = max_wait_s
        self._load = load
        self._clock = clock
        self._recent: RecentlyUsed[TextSource, ServedText] = RecentlyUsed(max_loaded)
        self._alive: WeakValueDictionary[TextSource, ServedText] = WeakValueDictionary()
        self._loading: dict[TextSource, asyncio.Task[ServedText]] = {}
        self._failures: dict[TextSource, float] = {}  # the time until which a source is refused
        examine_struct_types()  # several threads decode the same files of different models
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="model-text")

    def __len__(self) -> int:
        return len(self._alive)

    async def get(self, source: TextSource) -> ServedText:
        """Returns the text. Raises NoCapacity if its files cannot be read; their paths and the
        reason are logged, since they are for operators.
        """
        text = self._alive.get(source)
        if text is None:
            text = await self._loaded(source)
        self._recent.put(source, text)
        return text

    async def close(self) -> None:
        for task in self._loading.values():
            task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
        for text in [*self._alive.values()]:
            await text.renderer.close()

    async def _loaded(self, source: TextSource) -> ServedText:
        self._check_pause(source)
        task = self._loading.get(source)
        if task is None:
            task = self._loading[source] = start_awaited(self._read(source))
            task.add_done_callback(lambda _: self._loading.pop(source))
        try:
            async with asyncio.timeout(self.max_wait_s):
                return await asyncio.shield(task)  # other requests wait for it, too
        except TimeoutError:
            reason = "the files of this model are still being read"
            raise NoCapacity(reason, retry_after_s=RETRY_S) from None

    async def _read(self, source: TextSource) -> ServedText:
        loop = asyncio.get_running_loop()
        loaded, seconds = await loop.run_in_executor(self._threads, self._timed_load, source.place)
        if isinstance(loaded, Exception):
            self._fail(source, one_line(loaded), seconds)
            self._check_pause(source)
            raise loaded
        await loaded.renderer.load_tokenizer()  # else a second request waits for a turn
        self._alive[source] = loaded
        self._recent.put(source, loaded)  # its requests may have waited for too long and left
        log.info("model_text_loaded", source=source.place, seconds=seconds)
        return loaded

    def _timed_load(self, place: str) -> tuple[ServedText | Exception, float]:
        """Returns the text and the seconds of its load, without the wait for a thread."""
        began_at = self._clock.now()
        try:
            loaded: ServedText | Exception = self._load(place)
        except BaseException as raised:  # the edge to files that are not ours
            loaded = item_error(raised)
        return loaded, self._clock.now() - began_at

    def _fail(self, source: TextSource, reason: str, load_s: float) -> None:
        now = self._clock.now()
        pause_s = min(MAX_PAUSE_S, max(RETRY_S, PAUSE_FACTOR * load_s))
        self._failures = {key: until for key, until in self._failures.items() if until > now}
        self._failures[source] = now + pause_s
        log.warning("model_text_unreadable", source=source.place, reason=reason)

    def _check_pause(self, source: TextSource) -> None:
        left_s = self._failures.get(source, 0.0) - self._clock.now()
        if left_s > 0:
            raise NoCapacity(
                "the files of this model cannot be read at the gateway: its log names them",
                retry_after_s=left_s,
            )

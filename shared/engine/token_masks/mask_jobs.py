"""Hands the mask jobs of a worker's choices to its threads, and tells when a late one is done."""

from __future__ import annotations

from collections.abc import Callable

from shared.engine.token_masks.mask_job import MaskJob
from shared.engine.token_masks.mask_threads import GrammarThreads


class MaskJobs:
    """Used on the event loop's thread alone, but for `submit` of slow jobs."""

    def __init__(self, threads: GrammarThreads, *, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.num_late = 0
        self._threads = threads
        self._collected: list[MaskJob] = []  # jobs of the step that is being applied
        self._on_ready: Callable[[], None] = lambda: None

    def on_ready(self, handler: Callable[[], None]) -> None:
        """Calls `handler`, on any thread, when a choice that was stalled may continue."""
        self._on_ready = handler

    def submit(self, job: MaskJob, *, is_slow: bool) -> None:
        if is_slow:
            self._threads.submit_slow(job)
        else:
            self._collected.append(job)

    def flush(self) -> None:
        """Starts the submitted jobs that are not slow, all at once."""
        if self._collected:
            collected, self._collected = self._collected, []
            self._threads.submit(collected)

    def await_(self, job: MaskJob, *, is_late: bool) -> None:
        """Waits for a job: nothing is sampled until it is done. If `is_late`, a step has
        not waited for it.
        """
        self.num_late += is_late
        job.on_done = self._on_ready
        self._threads.watch(job)
        if job.is_done:  # maybe before `on_done` was set
            self._on_ready()

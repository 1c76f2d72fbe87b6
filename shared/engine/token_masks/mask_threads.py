"""The threads that compile grammars and fill masks: a fast one, a slow one, and one that watches.

The fast thread fills the masks of a step. The slow thread compiles, replays, and fills the masks of
grammars whose last one took long; its threads yield the processor to the model's.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

import structlog

from shared.engine.token_masks.worker_thread import MAX_JOB_S, Job, WorkerThread

log = structlog.get_logger(__name__)

# CPU time after which the next mask of the sequence is filled in the slow thread
SLOW_MASK_S = 5e-3
SLOW_TAKEOVER_S = 0.1
NICENESS = 5
WATCH_S = 5e-3


class AwaitedJob(Job, Protocol):
    @property
    def is_done(self) -> bool: ...


class GrammarThreads(Protocol):
    @property
    def num_abandoned_threads(self) -> int:
        """Threads since the start whose job took longer than MAX_JOB_S."""
        ...

    def submit(self, jobs: Sequence[Job]) -> None:
        """Runs the jobs beside the next step's forward pass."""
        ...

    def submit_slow(self, job: Job) -> None: ...

    def watch(self, job: AwaitedJob) -> None:
        """Watches a job that a sequence waits for, and takes over if it is slow."""
        ...

    def close(self) -> None: ...


class MaskThreads:
    def __init__(self, *, max_job_s: float = MAX_JOB_S) -> None:
        self._fast = WorkerThread("fast", takeover_s=SLOW_MASK_S, max_job_s=max_job_s)
        self._slow = WorkerThread(
            "slow", takeover_s=SLOW_TAKEOVER_S, niceness=NICENESS, max_job_s=max_job_s
        )
        self._changed = threading.Condition()
        self._watched: list[AwaitedJob] = []
        self._watching: threading.Thread | None = None
        self._is_closed = threading.Event()

    @property
    def num_abandoned_threads(self) -> int:
        return self._fast.num_abandoned + self._slow.num_abandoned

    def submit(self, jobs: Sequence[Job]) -> None:
        self._fast.submit(jobs)

    def submit_slow(self, job: Job) -> None:
        self._slow.submit([job])

    def watch(self, job: AwaitedJob) -> None:
        with self._changed:
            self._watched.append(job)
            if self._watching is None:
                self._watching = self._started_watch()
            self._changed.notify()

    def _started_watch(self) -> threading.Thread | None:
        """Returns None if the system starts no thread now: the next job tries again."""
        thread = threading.Thread(target=self._watch, name="grammar-watch", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            log.warning("grammar_watch_not_started", reason=str(error))
            return None
        return thread

    def close(self) -> None:
        self._is_closed.set()
        with self._changed:
            self._changed.notify()
        self._fast.close()
        self._slow.close()

    def _watch(self) -> None:
        while not self._is_closed.wait(WATCH_S):
            self._fast.check()
            self._slow.check()
            with self._changed:
                self._watched = [job for job in self._watched if not job.is_done]
                while not self._watched and not self._is_closed.is_set():
                    self._changed.wait()

"""A thread beside the event loop that runs jobs one at a time, in turns of tenants.

A job in native code cannot be stopped. When it takes longer than `takeover_s`, another thread runs
the jobs behind it, and its own yields the processor; after `MAX_JOB_S` it fails, and its thread
ends whenever it returns. If the system starts no thread, the caller runs the jobs itself: late, but
nobody waits for ever.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Protocol

import structlog

log = structlog.get_logger(__name__)

MAX_JOB_S = 2.0
MAX_THREADS = 8  # includes those whose job is slow
SLOW_NICENESS = 5  # niceness of a replaced thread, added to its own
CLOSE_S = 0.2


class Job(Protocol):
    @property
    def tenant_id(self) -> str: ...

    def run(self) -> None:
        """Called once, on the worker thread; must not raise."""
        ...

    def time_out(self) -> None:
        """Called when the job has taken MAX_JOB_S. It may still be running."""
        ...


class WorkerThread:
    def __init__(
        self, name: str, *, takeover_s: float, niceness: int = 0, max_job_s: float = MAX_JOB_S
    ) -> None:
        self.num_abandoned = 0  # threads given up since the start
        self._name = name
        self._takeover_s = takeover_s
        self._niceness = niceness
        self._max_job_s = max_job_s
        self._changed = threading.Condition()
        self._jobs: OrderedDict[str, deque[Job]] = OrderedDict()  # key: tenant, the next one first
        self._active: _Runner | None = None  # it takes jobs
        self._slow: list[_Runner] = []  # replaced threads, until they end
        self._is_closed = False

    def submit(self, jobs: Iterable[Job]) -> None:
        """Adds jobs, and wakes the thread once for all of them."""
        has_runner = True
        with self._changed:
            for job in jobs:
                self._jobs.setdefault(job.tenant_id, deque()).append(job)
            if self._active is None and not self._is_closed:
                has_runner = self._start_runner()
            self._changed.notify()
        if not has_runner:
            self._run_here()

    def check(self) -> None:
        """Takes over from a slow job, and ends its wait. Call it while a job is awaited."""
        now = time.monotonic()
        with self._changed:
            active = self._active
            is_slow = active is not None and active.age_s(now) > self._takeover_s
            if active is not None and is_slow and self._may_take_over() and self._start_runner():
                self._slow.append(active)
                _be_nicer(SLOW_NICENESS, active.thread.native_id)
            overdue = [each for each in self._runners() if each.age_s(now) > self._max_job_s]
            jobs = [each.job for each in overdue if not each.is_abandoned]
            for each in overdue:
                each.is_abandoned = True
            self.num_abandoned += len(jobs)
        for job in jobs:
            if job is not None:
                log.warning("grammar_thread_abandoned", thread=self._name, tenant=job.tenant_id)
                job.time_out()

    def close(self) -> None:
        """Waits a moment for the current job; the others do not run."""
        with self._changed:
            self._is_closed = True
            self._jobs.clear()
            self._changed.notify_all()
            threads = [each.thread for each in self._runners()]
        for thread in threads:
            thread.join(CLOSE_S / len(threads))

    def _may_take_over(self) -> bool:
        return len(self._slow) < MAX_THREADS - 1 and not self._is_closed

    def _runners(self) -> list[_Runner]:
        return [*self._slow, *([] if self._active is None else [self._active])]

    def _start_runner(self) -> bool:
        """Returns whether the system could start a thread."""
        runner = _Runner()
        runner.thread = threading.Thread(
            target=self._run, args=(runner,), name=f"grammar-{self._name}", daemon=True
        )
        try:
            runner.thread.start()
        except RuntimeError as error:
            log.warning("grammar_thread_not_started", thread=self._name, reason=str(error))
            return False
        self._active = runner
        return True

    def _run_here(self) -> None:
        while True:
            with self._changed:
                if not self._jobs or self._active is not None:
                    return
                job = self._take()
            job.run()

    def _run(self, runner: _Runner) -> None:
        _be_nicer(self._niceness, threading.get_native_id())
        while (job := self._next(runner)) is not None:
            job.run()
            job = None  # it holds the memory of a sequence

    def _next(self, runner: _Runner) -> Job | None:
        """Waits for a job. Returns None if this thread must end."""
        with self._changed:
            runner.job, runner.is_abandoned = None, False
            while self._active is runner and not self._jobs and not self._is_closed:
                self._changed.wait()
            if self._active is not runner or self._is_closed:
                if runner in self._slow:
                    self._slow.remove(runner)
                return None
            runner.job, runner.began_at = self._take(), time.monotonic()
            return runner.job

    def _take(self) -> Job:
        tenant_id, jobs = self._jobs.popitem(last=False)
        job = jobs.popleft()
        if jobs:
            self._jobs[tenant_id] = jobs
        return job


class _Runner:
    """A thread and its job."""

    __slots__ = ("began_at", "is_abandoned", "job", "thread")

    def __init__(self) -> None:
        self.thread: threading.Thread
        self.job: Job | None = None
        self.began_at = 0.0
        self.is_abandoned = False

    def age_s(self, now: float) -> float:
        """Returns how long the job has been running."""
        return 0.0 if self.job is None else now - self.began_at


def _be_nicer(added: int, thread_id: int | None) -> None:
    """Adds to the niceness of one thread, if the system has priorities of threads."""
    if added and thread_id is not None and hasattr(os, "setpriority"):
        try:
            own = os.getpriority(os.PRIO_PROCESS, thread_id)
            os.setpriority(os.PRIO_PROCESS, thread_id, own + added)
        except ProcessLookupError:  # it has just ended
            pass
        except OSError as error:
            log.info("niceness_not_set", reason=str(error))

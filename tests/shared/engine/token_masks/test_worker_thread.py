"""Jobs run on other threads, whatever another job does."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from shared.engine.token_masks.worker_thread import MAX_THREADS, SLOW_NICENESS, WorkerThread

WAIT_S = 10.0


class Gate:
    """A job that runs until it is opened, as native code that cannot be stopped."""

    def __init__(self, tenant_id: str, log: list[str] | None = None) -> None:
        self.tenant_id = tenant_id
        self.log = [] if log is None else log
        self.began = threading.Event()
        self.opened = threading.Event()
        self.ended = threading.Event()
        self.num_time_outs = 0
        self.thread_id = 0

    def run(self) -> None:
        self.thread_id = threading.get_native_id()
        self.began.set()
        assert self.opened.wait(WAIT_S)
        self.log.append(self.tenant_id)
        self.ended.set()

    def time_out(self) -> None:
        self.num_time_outs += 1


def opened(tenant_id: str, log: list[str]) -> Gate:
    gate = Gate(tenant_id, log)
    gate.opened.set()
    return gate


@pytest.fixture
def thread() -> Iterator[WorkerThread]:
    thread = WorkerThread("test", takeover_s=0.0, max_job_s=3600.0)
    yield thread
    thread.close()


def test_tenants_take_turns(thread: WorkerThread) -> None:
    log: list[str] = []
    first = Gate("a", log)
    thread.submit([first])
    assert first.began.wait(WAIT_S)
    jobs = [opened(tenant, log) for tenant in "aaaabbc"]
    thread.submit(jobs)
    first.opened.set()
    assert all(job.ended.wait(WAIT_S) for job in jobs)
    assert "".join(log) == "aabcabaa"


def test_another_thread_runs_the_jobs_behind_a_slow_one(thread: WorkerThread) -> None:
    slow, after = Gate("a"), opened("a", [])
    thread.submit([slow, after])
    assert slow.began.wait(WAIT_S)
    assert not after.began.is_set()
    thread.check()
    assert after.ended.wait(WAIT_S)
    slow.opened.set()
    assert slow.ended.wait(WAIT_S)
    last = opened("a", [])  # the thread goes on
    thread.submit([last])
    assert last.ended.wait(WAIT_S)


def test_thread_of_a_slow_job_yields_the_processor(thread: WorkerThread) -> None:
    """It shares the cores with the model's threads."""
    slow, after = Gate("a"), opened("a", [])
    thread.submit([slow, after])
    assert slow.began.wait(WAIT_S)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, slow.thread_id) == own
    thread.check()
    assert os.getpriority(os.PRIO_PROCESS, slow.thread_id) == own + SLOW_NICENESS
    assert after.ended.wait(WAIT_S)
    slow.opened.set()
    last = opened("a", [])  # by a thread that yields nothing
    thread.submit([last])
    assert last.ended.wait(WAIT_S)
    assert last.thread_id == after.thread_id != slow.thread_id


def test_slow_jobs_take_a_limited_number_of_threads(thread: WorkerThread) -> None:
    slow = [Gate("a") for _ in range(MAX_THREADS)]
    for gate in slow:
        thread.submit([gate])
        assert gate.began.wait(WAIT_S)
        thread.check()
    after = opened("a", [])
    thread.submit([after])
    thread.check()
    assert not after.began.is_set()
    slow[0].opened.set()  # its thread ends; that of the last one still takes no other job
    slow[-1].opened.set()
    assert after.ended.wait(WAIT_S)
    for gate in slow:
        gate.opened.set()


def test_job_over_the_limit_times_out_once_and_its_thread_is_abandoned() -> None:
    thread = WorkerThread("test", takeover_s=0.0, max_job_s=0.0)
    slow, after = Gate("a"), opened("a", [])
    thread.submit([slow])
    assert slow.began.wait(WAIT_S)
    thread.check()
    thread.check()
    assert slow.num_time_outs == thread.num_abandoned == 1
    thread.submit([after])
    assert after.ended.wait(WAIT_S)
    slow.opened.set()
    thread.close()


def test_closed_thread_runs_nothing_more() -> None:
    thread, log = WorkerThread("test", takeover_s=0.0), list[str]()
    job = opened("a", log)
    thread.submit([job])
    assert job.ended.wait(WAIT_S)
    thread.close()
    thread.submit([opened("b", log)])
    assert log == ["a"]
    assert not [each for each in threading.enumerate() if each.name == "grammar-test"]


def test_jobs_run_though_a_thread_cannot_start(
    thread: WorkerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    log: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        thread.submit([opened("a", log), opened("b", log)])
    assert log == ["a", "b"]
    job = Gate("c", log)
    thread.submit([job])
    assert job.began.wait(WAIT_S), "the lane has a thread again"
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        thread.check()
    job.opened.set()
    assert job.ended.wait(WAIT_S)
    after = opened("d", log)
    thread.submit([after])
    assert after.ended.wait(WAIT_S), "the thread that could not be replaced takes jobs"

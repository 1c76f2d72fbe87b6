"""Processes that render, decode, tokenize and check grammars for all models, in fair turns of the
tenants.

    waiting ──a process is free──▶ running ──reply, or its process ended──▶ settled
       └──`max_wait_s`: Overloaded

Small conversations of one tenant and model, of some 0.1 ms each, share a turn: a process gets up to
MAX_BATCH of them at once, since each round trip waits for the event loop. If one ends the process,
those after it run in the tenant's next turn, unless they have waited for `max_wait_s` by then.

The pool starts further processes when all are busy, and unless it `grows`, some seconds after its
start. One more is a spare: it takes the place of a process that was killed, so that no job waits
for a start; in a pool that grows, also that of one that is busy.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec
import structlog

from services.gateway.preparation.fair_turns import FairTurns
from services.gateway.preparation.recently_used import RecentlyUsed
from services.gateway.text.process_jobs import (
    MAX_SETUPS,
    NO_MODEL,
    SIZE,
    EncodeJob,
    Job,
    JobFinished,
    ProcessSetup,
    RenderJob,
    Reply,
    SelectModel,
    frame,
    limit_s,
    over_limit,
    with_pixels,
)
from shared.background import Background, is_logged, item_error
from shared.errors import HearthError, InvalidRequest, NoCapacity, Overloaded
from shared.lifecycle.child_process import (
    FreezeDetector,
    child_environ,
    lower_priority,
)
from shared.lifecycle.piped_child import PipedChild, start_piped

MAX_WAIT_S = 5.0  # seconds until a turn; a job that has started is not timed out by this
MAX_BATCH = 16
MAX_SMALL_BYTES = 4096  # or characters, of a job that shares a turn: a pipe holds all of them
PART_BYTES = 64 << 10
# Wall time of one job beyond its CPU limit, of a process that cannot be watched. One that can has
# no such limit: on a busy machine it may wait for a core for longer, and the next one, too.
HANG_S = 10.0
SUSPECT_S = 0.5  # twice without progress, and the process of a job counts as frozen
SPARE_DELAY_S = 5.0  # after the start, which then has the cores to itself
TEMPLATE_PROCESS = "services.gateway.preparation.template_process"
# Exit statuses: the process's alarm ended it, or its native code found no memory or stack.
OVER_LIMIT = {-signal.SIGPROF, -signal.SIGABRT, -signal.SIGSEGV}

log = structlog.get_logger(__name__)

_decoder: msgspec.msgpack.Decoder[JobFinished] = msgspec.msgpack.Decoder(JobFinished)


def default_num_processes() -> int:
    return max(2, (os.cpu_count() or 1) // 4)


@dataclass(eq=False, slots=True)
class _WaitingJob:
    tenant_id: str
    setup: ProcessSetup
    job: Job
    reply: asyncio.Future[Reply]
    was_frozen: bool = False  # its process was: the job gets one more
    is_overdue: bool = False  # it came later than `max_wait_s` ago, and is in a turn


class _PoolProcess:
    """Sends jobs to one process, which has the setups of some models."""

    def __init__(self, process: PipedChild) -> None:
        self.process = process
        self._setups: RecentlyUsed[str, str] = RecentlyUsed(MAX_SETUPS)
        self._selected: str | None = None
        self._progress = FreezeDetector(process.pid)
        self._watch: asyncio.TimerHandle | None = None
        self.is_frozen = False  # and killed

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_alive(self) -> bool:
        return self.process.returncode is None

    @property
    def is_watched(self) -> bool:
        """Whether it is seen to freeze, between `begin_watch` and `end_watch`."""
        return self.is_alive and self._progress.can_watch

    def has_loaded(self, setup: ProcessSetup) -> bool:
        return setup.key in self._setups

    def send_setup(self, setup: ProcessSetup) -> None:
        """Selects the model of the jobs that follow."""
        if self._selected == setup.key:
            return
        self._selected = setup.key
        if self._setups.get(setup.key) is not None:
            self.send(frame(SelectModel(setup.key)))
        else:
            self._setups.put(setup.key, setup.key)
            self.send(frame(setup))

    def send(self, *frames: bytearray) -> None:
        """Writes without draining: the other process may not read until its reply is read."""
        self.process.stdin.writelines(frames)

    async def finished(self) -> JobFinished:
        (size,) = SIZE.unpack(await self.process.stdout.readexactly(SIZE.size))
        finished = _decoder.decode(await self.process.stdout.readexactly(size))
        reply = await with_pixels(finished.reply, self._read)
        return JobFinished(reply, finished.cpu_s)

    async def _read(self, num_bytes: int) -> bytearray:
        """Reads in parts: a copy of megabytes at once would hold up running streams."""
        data = bytearray(num_bytes)
        for start in range(0, num_bytes, PART_BYTES):
            end = min(start + PART_BYTES, num_bytes)
            data[start:end] = await self.process.stdout.readexactly(end - start)
        return data

    def kill(self) -> None:
        self.process.kill()

    def begin_watch(self) -> None:
        """Kills the process if it freezes before `end_watch`."""
        self._progress.begin()
        self._watch = asyncio.get_running_loop().call_later(SUSPECT_S, self._check)

    def end_watch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()

    def _check(self) -> None:
        if self._progress.is_frozen():
            self.is_frozen = True
            log.warning("preparation_process_frozen", pid=self.pid)
            self.kill()
        else:
            self._watch = asyncio.get_running_loop().call_later(SUSPECT_S, self._check)

    async def killed(self) -> None:
        self.kill()
        await self.process.wait()


@dataclass(eq=False, slots=True)
class _Seat:
    """One place in the pool. `process`: None until its first job, and after a process ended.
    `running`: jobs of one turn without a reply, in their order.
    """

    process: _PoolProcess | None = None
    running: deque[_WaitingJob] = field(default_factory=deque)


class PreparationPool:
    def __init__(
        self,
        setup: ProcessSetup | None,
        *,
        num_processes: int | None = None,
        module: str = TEMPLATE_PROCESS,
        max_wait_s: float = MAX_WAIT_S,
        hang_s: float = HANG_S,
        spare_delay_s: float = SPARE_DELAY_S,
        niceness: int = 0,
        grows: bool = False,
        is_costly: bool = False,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        """`setup`: of the model that a process loads as it starts, until another has had jobs;
        None: there is none yet. `num_processes`: without the spare. `module`: what each process
        runs. `niceness`: of each process, beyond this one's. `grows`: whether it has no more
        processes than were busy at once: one of a large vocabulary takes 0.5 s of CPU to start, and
        100 MB. `is_costly`: whether a process takes seconds to start: there is no spare, and none
        is killed because the client of its job has left. `on_lost`: called for each process that
        `num_lost` counts.
        """
        count = default_num_processes() if num_processes is None else num_processes
        self.max_wait_s = max_wait_s
        self.hang_s = hang_s
        self._spare_delay_s = spare_delay_s
        self._niceness = niceness
        self._grows = grows
        self._is_costly = is_costly
        self._on_lost = on_lost
        self._setup = setup  # the last job's
        self._module = module
        self._seats = [_Seat() for _ in range(count)]
        self._turns: FairTurns[_WaitingJob] = FairTurns(max_running=max(1, count // 2))
        self._spares: list[_PoolProcess] = []
        self._dying: list[_PoolProcess] = []  # killed, and not yet seen to have ended
        self._background = Background()
        self._is_filling = self._is_closed = False
        self.num_lost = 0  # processes that ended, or were killed, while they ran a job

    @property
    def process_ids(self) -> list[int]:
        """The ids of the processes in the pool, without the spare."""
        return [each.process.pid for each in self._seats if each.process is not None]

    @property
    def num_waiting(self) -> int:
        """Jobs that no process runs yet."""
        return self._turns.num_waiting

    @property
    def num_running(self) -> int:
        return sum(len(each.running) for each in self._seats)

    async def start(self) -> None:
        """Starts one process, so that the first job does not wait for it. Optional first call."""
        await self._started(self._seats[0], self._setup)
        self._start_spares()

    async def run(self, tenant_id: str, setup: ProcessSetup, job: Job) -> Reply:
        """Returns the reply to a job. `setup`: of the job's model. Raises Overloaded if the job
        does not start within `max_wait_s`, and NoCapacity.
        """
        if self._is_closed:
            raise _stopped()
        loop = asyncio.get_running_loop()
        waiting = _WaitingJob(tenant_id, setup, job, loop.create_future())
        self._turns.add(tenant_id, waiting)
        self._start_jobs()
        patience = loop.call_later(self.max_wait_s, self._give_up, waiting)
        try:
            return await waiting.reply
        except asyncio.CancelledError:
            self._leave(waiting)
            raise
        finally:
            patience.cancel()

    def kill(self) -> None:
        """Ends the processes without waiting for them. A later job starts another."""
        for seat in self._seats:
            if seat.process is not None:
                seat.process.kill()

    async def close(self) -> None:
        self._is_closed = True
        for waiting in self._turns.take_all():
            _fail(waiting, _stopped())
        for seat in self._seats:
            for waiting in seat.running:
                _fail(waiting, _stopped())
        await self._background.stop()
        for seat in self._seats:
            await self._end(seat)
        for process in (*self._spares, *self._dying):
            await process.killed()

    # ── jobs ─────────────────────────────────────────────────────────────────────────────────────

    def _start_jobs(self) -> None:
        while not all(each.running for each in self._seats):
            turn = self._turns.next()
            if turn is None:
                return
            jobs = self._batch(*turn)
            seat = self._free_seat(jobs[0].setup)
            seat.running.extend(jobs)
            self._background.start_item(self._run(seat, jobs[0]), partial(_fail_jobs, jobs))

    def _batch(self, tenant_id: str, first: _WaitingJob) -> list[_WaitingJob]:
        if not _is_small(first.job):
            return [first]
        key = first.setup.key
        more = self._turns.take_more(
            tenant_id, MAX_BATCH - 1, lambda each: _is_small(each.job) and each.setup.key == key
        )
        return [first, *more]

    def _free_seat(self, setup: ProcessSetup) -> _Seat:
        """Returns a seat whose process has this model, else one whose process runs, else any free
        one.
        """
        free = [each for each in self._seats if not each.running]
        return min(free, key=lambda each: _order(each.process, setup))

    async def _run(self, seat: _Seat, first: _WaitingJob) -> None:
        running, cpu_s, has_lost = seat.running, 0.0, True
        process: _PoolProcess | None = None
        try:
            async with asyncio.timeout(limit_s(first.job) + self.hang_s):
                if first.setup is not NO_MODEL:
                    self._setup = first.setup
                process = await self._started(seat, first.setup)
                process.begin_watch()
                process.send_setup(first.setup)
                process.send(*(frame(each.job) for each in running))
                self._start_spares()
            while running:
                longest_s = limit_s(running[0].job) + self.hang_s
                async with asyncio.timeout(None if process.is_watched else longest_s):
                    finished = await process.finished()
                cpu_s += finished.cpu_s
                _settle(running.popleft(), finished.reply)
            has_lost = False
        except (ConnectionError, EOFError):
            process_ended = await self._end(seat)
            if process is not None and process.is_frozen and not running[0].was_frozen:
                running[0].was_frozen = True  # it is put back, for a spare
                has_lost = False
                self._count_lost()
            else:
                _settle_lost(running.popleft(), process_ended)
        except (TimeoutError, OSError, RuntimeError, msgspec.DecodeError):  # uvloop: a closed pipe
            await self._end(seat)
            error = NoCapacity("the preparation process hangs", retry_after_s=1.0)
            _fail(running.popleft(), error)
        except BaseException as raised:  # a client's data may raise anything
            item_error(raised)
            await self._end(seat)
            running.clear()
            raise
        finally:
            if process is not None:
                process.end_watch()
            left = [each for each in running if not each.reply.done()]
            running.clear()
            if has_lost and not self._is_closed:
                self._count_lost()
            cpu_s += limit_s(first.job) if has_lost else 0.0
            self._turns.ended(first.tenant_id, cpu_s, reached_limit=has_lost)
            if not self._is_closed:
                _fail_overdue([each for each in left if each.is_overdue])
                self._turns.put_back(
                    first.tenant_id, [each for each in left if not each.is_overdue]
                )
                self._start_jobs()
                self._start_spares()

    def _leave(self, waiting: _WaitingJob) -> None:
        """Kills the process that runs a cancelled job alone, so that the next job need not wait."""
        self._turns.remove(waiting.tenant_id, waiting)
        if self._is_costly:
            return
        for seat in self._seats:
            if [*seat.running] == [waiting] and seat.process is not None:
                process, seat.process = seat.process, None  # the next job takes another
                process.kill()
                self._dying = [*filter(_is_alive, self._dying), process]

    def _give_up(self, waiting: _WaitingJob) -> None:
        waiting.is_overdue = True
        if all(waiting not in seat.running for seat in self._seats):
            self._turns.remove(waiting.tenant_id, waiting)
            _fail_overdue([waiting])

    # ── processes ────────────────────────────────────────────────────────────────────────────────

    async def _started(self, seat: _Seat, setup: ProcessSetup | None) -> _PoolProcess:
        while not _is_alive(seat.process) and self._spares:
            seat.process = self._spares.pop()
        if seat.process is None or not seat.process.is_alive:
            seat.process = await self._spawn(setup)
        return seat.process

    async def _spawn(self, setup: ProcessSetup | None) -> _PoolProcess:
        command = (sys.executable, "-m", self._module)
        process = await start_piped(command, child_environ(os.environ))
        if self._niceness:
            lower_priority(process.pid, self._niceness)  # its start included
        spawned = _PoolProcess(process)
        if setup is not None:
            spawned.send_setup(setup)
        return spawned

    def _start_spares(self) -> None:
        """Starts the missing processes in the background: SPARE_DELAY_S after the start, later at
        once.
        """
        if self._is_costly:
            return
        if not self._is_filling and self._num_alive() <= self._num_wanted():
            self._is_filling = True
            self._background.start_item(self._fill(), is_logged)

    async def _fill(self) -> None:
        delay_s, self._spare_delay_s = self._spare_delay_s, 0.0
        try:
            await asyncio.sleep(delay_s)
            while self._num_alive() <= self._num_wanted():
                self._spares.append(await self._spawn(self._setup))
        except OSError as error:
            log.warning("preparation_process_not_started", error=str(error))
        finally:
            self._is_filling = False

    def _num_wanted(self) -> int:
        """Returns the number of processes that the pool should have, without the spare."""
        if not self._grows:
            return len(self._seats)
        return max(1, sum(bool(each.running) for each in self._seats))

    def _num_alive(self) -> int:
        """Returns the number of processes that run or are starting for a job."""
        self._spares = [each for each in self._spares if _is_alive(each)]
        seated = (_is_alive(each.process) or bool(each.running) for each in self._seats)
        return len(self._spares) + sum(seated)

    def _count_lost(self) -> None:
        self.num_lost += 1
        self._on_lost()

    async def _end(self, seat: _Seat) -> PipedChild | None:
        """Kills the seat's process. Returns it with its exit status."""
        process, seat.process = seat.process, None
        if process is None:
            return None
        await process.killed()
        return process.process


def _is_alive(process: _PoolProcess | None) -> bool:
    return process is not None and process.is_alive


def _order(process: _PoolProcess | None, setup: ProcessSetup) -> int:
    if process is None or not process.is_alive:
        return 2
    return 0 if process.has_loaded(setup) else 1


def _stopped() -> NoCapacity:
    return NoCapacity("the gateway stops", retry_after_s=1.0)


def _settle(waiting: _WaitingJob, reply: Reply) -> None:
    if not waiting.reply.done():  # done: the client disconnected
        waiting.reply.set_result(reply)


def _settle_lost(waiting: _WaitingJob, process: PipedChild | None) -> None:
    """Ends a job whose process ended, by a limit or otherwise, such as by a kill."""
    if process is None or process.returncode not in OVER_LIMIT:
        _fail(waiting, NoCapacity("the preparation process ended", retry_after_s=1.0))
    else:
        _settle(waiting, over_limit(waiting.job))


def _is_small(job: Job) -> bool:
    match job:
        case RenderJob():
            return len(job.values) <= MAX_SMALL_BYTES
        case EncodeJob():
            return job.num_chars <= MAX_SMALL_BYTES
    return False


def _fail_jobs(jobs: Sequence[_WaitingJob], error: Exception) -> None:
    for waiting in jobs:
        _fail(waiting, InvalidRequest("the request cannot be prepared"))


def _fail_overdue(jobs: Sequence[_WaitingJob]) -> None:
    for waiting in jobs:
        _fail(waiting, Overloaded("too many requests wait to be prepared", retry_after_s=1.0))


def _fail(waiting: _WaitingJob, error: HearthError) -> None:
    if not waiting.reply.done():
        waiting.reply.set_exception(error)

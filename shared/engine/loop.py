"""Drives an engine: schedule, submit to the executor, apply its results, call the listeners.

All bookkeeping runs on the event loop's thread, so it needs no locks; only the computation runs
elsewhere. Up to `Executor.depth` steps are in flight; they are applied in order. The step counter
also increases while idle, so that a watcher can distinguish idle from hung.

A step that raises is computed again in parts: a row that raises alone fails, the other rows get
the tokens that they would have had. Repeating a step changes nothing: it writes the same KV to the
same slots and samples with the same noise. Steps after it that are in flight are awaited first:
their rows that are also in a failed step are void, because they lack its KV and its token.

    step raises ──▶ check the device ──raises───────────────────────────▶ device lost
                         └──▶ halves ──▶ rows that raise alone: StepFailed
                                │        (most rows, of several requests: DeviceFailed)
                                └──no row succeeds, three times (failed_steps.py)──▶ device lost

A step that runs out of the device's memory is no failure of the device. Its rows go back to the
batcher, whose steps are then smaller for a time (batching/step_limit.py), down to a few tokens.

    out of memory ──▶ rows scheduled again, half as many tokens a step
         └──few tokens──▶ halves ──▶ rows that do not fit alone: OutOfMemory
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

import structlog

from shared.background import Background, item_error
from shared.clock import Clock
from shared.engine.batching.batcher import ScheduledSequence
from shared.engine.engine import Engine, StepProgress
from shared.engine.executors.elastic_kv import ElasticKv
from shared.engine.executors.executor import Executor
from shared.engine.executors.expert_load import ExpertLoad
from shared.engine.failed_steps import FailedSteps
from shared.engine.memory_shortage import MemoryShortage
from shared.engine.step import StepOutput
from shared.engine.step_counters import StepCounters
from shared.errors import DeviceFailed, OutOfMemory, StepFailed
from shared.messages import WorkerLoad

log = structlog.get_logger(__name__)

IDLE_TICK_S = 0.1
STANDBY_TICK_S = 0.5  # there is no work to find without a KV cache
COUNT_EXPERTS_S = 1.0
ZEROED_BYTES = 64 << 20  # bytes of a call: a few milliseconds, then the step counter increases

Listener = Callable[[list[StepProgress]], None]


@dataclass(frozen=True, slots=True)
class SubmittedStep:
    rows: list[ScheduledSequence]
    began_at: float
    number: int
    error: Exception | None = None  # it could not be submitted


class EngineLoop:
    def __init__(self, engine: Engine, executor: Executor, clock: Clock) -> None:
        self.engine = engine
        self.executor = executor
        self._samples_ahead = executor.depth > 1 and executor.num_stages == 1
        self._in_flight: deque[SubmittedStep] = deque()
        self.reported_began_at = 0.0  # begin of the step whose progress the listeners get
        self._clock = clock
        self._listeners: list[Listener] = []
        self._work = asyncio.Event()
        self._step = 0
        self._is_idle = True
        self._counters = StepCounters(executor.work)
        self._failed_steps = FailedSteps()
        self._shortage = MemoryShortage(clock)
        self._expert_load = ExpertLoad()
        self._num_failed_zeroings = 0
        self._on_device_lost: Callable[[], None] = lambda: None
        self._background = Background()
        self._task: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._is_lost = False
        self._zeroing = asyncio.Lock()
        self.kv = ElasticKv(engine, executor, self.zero_freed_blocks)

    def listen(self, listener: Listener) -> None:
        """Calls `listener` with every step's progress, on the event loop's thread; it must not
        block.
        """
        self._listeners.append(listener)

    def on_device_lost(self, handler: Callable[[], None]) -> None:
        """Calls `handler` once, when the device computes no more steps; none follows."""
        self._on_device_lost = handler

    def fence(self, reason: str) -> None:
        """Gives the device up, though steps may still succeed: no result of them is used."""
        self._listeners.clear()
        self._lose_device(reason)
        self.wake()

    def wake(self) -> None:
        """Wakes the loop, after the engine was given work."""
        self._work.set()

    def start(self) -> None:
        self._task = self._background.start_own(self._run())
        self._background.start_own(self._tick())
        self._background.start_own(self._count_experts())

    async def stop(self) -> None:
        """Waits for the steps in flight, then closes the executor."""
        self._is_stopping = True
        self.wake()
        if self._task is not None:
            await asyncio.wait((self._task,))
        await self._background.stop()
        await self.executor.close()

    async def zero_freed_blocks(self) -> None:
        """Returns when all blocks freed so far that the engine clears hold zeros. Call this before
        writing KV into newly allocated blocks.
        """
        pool, kv_layout = self.engine.pool, self.executor.kv_layout
        if not pool.has_freed and not self._zeroing.locked():
            return
        num_at_once = max(1, ZEROED_BYTES // kv_layout.block_bytes)
        async with self._zeroing:  # waits for blocks that another caller is zeroing
            freed = pool.take_freed()
            while freed:
                try:
                    await self.executor.zero_blocks(freed[:num_at_once])
                except BaseException:
                    pool.record_freed(freed)
                    raise
                self._step += 1
                del freed[:num_at_once]

    def load(self) -> WorkerLoad:
        engine = self.engine
        longest = engine.batcher.needs.longest  # free blocks are free for tokens of all layers
        limit = engine.batcher.limit
        budget_s = self._tick_s if self._is_idle else self.executor.step_budget_s
        return WorkerLoad(
            step=self._step,
            step_budget_s=budget_s + self.executor.step_extension_s,
            num_running=len(engine.batcher.running),
            num_waiting=len(engine.batcher.waiting),
            num_free_blocks=longest(engine.pool.num_free_blocks),
            num_total_blocks=longest(engine.pool.num_blocks),
            num_reserved_blocks=engine.num_reserved_blocks,
            prefill_tokens_in_flight=engine.num_uncomputed_tokens,
            decode_tokens_in_flight=engine.num_context_tokens,
            num_generated_tokens=engine.num_generated_tokens,
            num_computed_prompt_tokens=engine.num_computed_prompt_tokens,
            num_busy_steps=self._counters.num_steps,
            busy_s=self._counters.busy_s,
            num_preemptions=engine.batcher.num_preemptions,
            num_failed_steps=self._failed_steps.num_failed,
            num_failed_zeroings=self._num_failed_zeroings,
            num_out_of_memory=self._shortage.num + self.executor.num_out_of_memory,
            max_step_tokens=limit.tokens if limit.is_lowered else 0,
            num_prompt_tokens=engine.batcher.num_admitted_tokens,
            num_cached_prompt_tokens=engine.batcher.num_admitted_cached_tokens,
            expert_imbalance=self._expert_load.imbalance,
            offloaded_bytes=self.executor.offloaded_bytes,
            num_steps_by_tokens=tuple(self._counters.by_tokens),
            traffic_bytes=self._counters.traffic_bytes,
            num_operations=self._counters.num_operations,
            peaks=self.executor.peaks,
        )

    @property
    def _tick_s(self) -> float:
        return IDLE_TICK_S if self.engine.pool.num_blocks else STANDBY_TICK_S

    async def _run(self) -> None:
        while not self._is_stopping:
            if self.executor.has_ended:
                self._lose_device("a rank is lost")
                break
            if self.engine.pool.has_retired:
                await self._give_back()
            rows, progress = self.engine.schedule(
                samples_ahead=self._samples_ahead, num_stages=self.executor.num_stages
            )
            if progress:
                self._report(progress)
            if rows:
                self._in_flight.append(await self._submit(rows))
            num_in_flight = len(self._in_flight)
            if num_in_flight and (not rows or num_in_flight == self.executor.depth):
                self._report(await self._apply_oldest())
            elif not rows and not progress:
                self._work.clear()  # later work sets it again
                await self._zero_when_idle()
                await self._idle()
            self._step += 1
        while self._in_flight:
            self._report(await self._apply_oldest())

    async def _submit(self, rows: list[ScheduledSequence]) -> SubmittedStep:
        began_at, number = self._clock.now(), -1
        try:
            await self.zero_freed_blocks()
            number = self.executor.submit(rows)
        except BaseException as raised:  # the step fails like one that raises while it computes
            error = item_error(raised)
            return SubmittedStep(rows, began_at, number, error)
        finally:
            self._is_idle = False
        return SubmittedStep(rows, began_at, number)

    async def _result(self, step: SubmittedStep) -> StepOutput:
        if step.error is not None:
            raise step.error
        return await self.executor.result(step.number)

    async def _apply_oldest(self) -> list[StepProgress]:
        step = self._in_flight.popleft()
        self.reported_began_at = step.began_at
        try:
            output = await self._result(step)
        except BaseException as raised:  # some rows fail, the worker continues
            return await self._recover(step, self._noted(raised, step.rows))
        self._failed_steps.succeeded(step.rows[0])
        self.engine.batcher.limit.succeeded()
        now = self._clock.now()
        self._counters.add(step.rows, output, began_at=step.began_at, now=now)
        num_tokens = self.engine.num_new_tokens
        progress = self.engine.apply(step.rows, output)
        self._counters.add_tokens(self.engine.num_new_tokens - num_tokens)
        return progress

    def _noted(self, raised: BaseException, rows: list[ScheduledSequence]) -> Exception:
        """Logs why a step has failed, and returns it."""
        error = item_error(raised)
        if isinstance(error, OutOfMemory):
            self._note_shortage(error, rows)
        else:
            log.error("step_failed", num_sequences=len(rows), exc_info=error)
        return error

    def _note_shortage(self, error: OutOfMemory, rows: list[ScheduledSequence]) -> None:
        self._shortage.record(error, num_sequences=len(rows), num_tokens=_num_tokens(rows))

    async def _recover(self, step: SubmittedStep, error: Exception) -> list[StepProgress]:
        """Applies what is valid of the steps after a failed one, then computes its rows again. The
        rows of each failed step stay apart: those of several are no step.
        """
        failed = [self.engine.take_back(step.rows)]
        progress: list[StepProgress] = []
        num_tokens, errors = _num_tokens(step.rows), [error]
        while self._in_flight:
            later = self._in_flight.popleft()
            void = {row.sequence for row in chain(*failed)}
            try:
                output = await self._result(later)
            except BaseException as raised:
                errors.append(self._noted(raised, later.rows))
                num_tokens = max(num_tokens, _num_tokens(later.rows))
                failed.append(self.engine.take_back(later.rows, void))
            else:
                progress += self.engine.apply(later.rows, output, void)
        if not all(isinstance(each, OutOfMemory) for each in errors):
            return progress + await self._compute_failed(failed) if any(failed) else progress
        limit = self.engine.batcher.limit
        limit.lower(num_tokens)
        if num_tokens > limit.floor:
            self.engine.unschedule([*chain(*failed)])
            return progress
        return progress + await self._compute_in_parts(failed)

    async def _attempt(self, rows: list[ScheduledSequence]) -> StepOutput:
        return await self._result(await self._submit(rows))

    async def _compute_failed(self, steps: list[list[ScheduledSequence]]) -> list[StepProgress]:
        """Computes the rows of steps that raised, if the device works."""
        self._failed_steps.num_failed += 1
        if not await self._device_works():
            self._lose_device("its check raised")
            lost = DeviceFailed("the device of the worker failed")
            return self.engine.fail([*chain(*steps)], lost)
        return await self._compute_in_parts(steps)

    async def _compute_in_parts(self, steps: list[list[ScheduledSequence]]) -> list[StepProgress]:
        """Computes the rows of steps that raised. It does not count as a busy step: it says nothing
        about speed.

        One bad row of N takes at most 2 log2(N) further steps.
        """
        progress: list[StepProgress] = []
        failed: list[ScheduledSequence] = []
        parts = [half for rows in reversed(steps) if rows for half in _halves(rows)]
        while parts:
            part = parts.pop()
            self._step += 1
            try:
                output = await self._attempt(part)
            except BaseException as raised:
                error = item_error(raised)
                if isinstance(error, OutOfMemory):
                    self._note_shortage(error, part)
                if len(part) > 1:
                    parts += _halves(part)
                elif isinstance(error, OutOfMemory):
                    progress += await self._compute_alone(part)
                else:
                    _log_row(part[0], error)
                    failed += part
            else:
                self._failed_steps.succeeded(part[0])
                progress += self.engine.apply(part, output)
        return progress + (self._blame(failed, sum(map(len, steps))) if failed else [])

    async def _compute_alone(self, part: list[ScheduledSequence]) -> list[StepProgress]:
        """Has a row that lacked memory alone scheduled in smaller chunks. One of few tokens is
        computed once more: others may have given memory back.
        """
        limit, num_tokens = self.engine.batcher.limit, _num_tokens(part)
        if num_tokens > limit.floor:
            limit.lower(num_tokens)
            self.engine.unschedule(part)
            return []
        try:
            output = await self._attempt(part)
        except BaseException as raised:
            error = item_error(raised)
            _log_row(part[0], error)
            if not isinstance(error, OutOfMemory):
                return self._blame(part, len(part))
            self._note_shortage(error, part)
            lacks = f"the device of a worker has no memory for {num_tokens} more tokens"
            return self.engine.fail(part, OutOfMemory(lacks))
        return self.engine.apply(part, output)

    def _blame(self, failed: list[ScheduledSequence], num_rows: int) -> list[StepProgress]:
        """Ends the rows that raise when computed alone, or blames the device.

        The device is to blame if most rows of the step raise and they belong to several requests.
        """
        if len(failed) == num_rows:
            self._failed_steps.failed(failed[0])
            if self._failed_steps.is_device_lost:
                self._lose_device("steps in a row raised")
        num_requests = len({row.sequence.origin for row in failed})
        if num_requests > 1 and 2 * len(failed) > num_rows:
            return self.engine.fail(failed, DeviceFailed("the device of the worker failed"))
        return self.engine.fail(failed, StepFailed("the step raised for this request alone"))

    async def _device_works(self) -> bool:
        self._step += 1
        try:
            await self.executor.check()
        except OutOfMemory as error:
            self._shortage.record(error)
        except BaseException as raised:
            item_error(raised)
            log.exception("device_check_failed")
            return False
        return True

    def _lose_device(self, reason: str) -> None:
        if self._is_lost:
            return
        self._is_lost = True
        log.error("device_lost", reason=reason)
        self._is_stopping = True
        self._on_device_lost()

    async def _zero_when_idle(self) -> None:
        try:
            await self.zero_freed_blocks()
        except OutOfMemory as error:  # retried with the next tick
            self._shortage.record(error)
        except BaseException as raised:  # the engine's boundary: also retried
            item_error(raised)
            log.exception("zeroing_failed")
            self._num_failed_zeroings += 1
            if not await self._device_works():
                self._lose_device("zeroing and its check raised")

    async def _give_back(self) -> None:
        try:
            await self.kv.give_back()
        except BaseException as raised:  # the blocks go back with the next ones
            item_error(raised)
            log.exception("give_back_failed")

    async def _idle(self) -> None:
        self._is_idle = True
        try:
            await self.executor.forget_ended()
        except BaseException as raised:  # the device is lost, which the next turn reports
            item_error(raised)
            log.exception("forget_ended_failed")
        await self._work.wait()

    async def _tick(self) -> None:
        while True:
            await self._clock.sleep(self._tick_s)
            self.wake()

    async def _count_experts(self) -> None:
        """Ends at once for a model without experts."""
        num_steps = -1
        while True:
            if num_steps != self._counters.num_steps and not self.executor.has_ended:
                num_steps = self._counters.num_steps
                try:
                    totals = await self.executor.expert_counts()
                except OutOfMemory as error:
                    self._shortage.record(error)
                    continue
                except BaseException as raised:  # the device is lost, which the next step reports
                    item_error(raised)
                    log.exception("expert_counts_failed")
                    return
                if totals is None:
                    return
                self._expert_load.observe(totals, self._clock.now())
            await self._clock.sleep(COUNT_EXPERTS_S)

    def _report(self, progress: list[StepProgress]) -> None:
        for listener in self._listeners:
            listener(progress)


def _num_tokens(rows: list[ScheduledSequence]) -> int:
    return sum(row.num_scheduled_tokens for row in rows)


def _log_row(row: ScheduledSequence, error: Exception) -> None:
    """The step's error was logged with its traceback; this one names the request."""
    sequence = row.sequence
    log.warning(
        "row_failed",
        placement=sequence.placement_id.hex(),
        tenant=sequence.tenant_id,
        error=repr(error),
    )


def _halves(rows: list[ScheduledSequence]) -> list[list[ScheduledSequence]]:
    """Returns the halves of the rows. A single row is computed once more: the error may have
    been a passing one.
    """
    middle = len(rows) // 2
    return [rows[middle:], rows[:middle]] if middle else [rows]

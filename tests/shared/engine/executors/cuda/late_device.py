"""A CUDA device on CPU tensors that does its work late: at random moments, or when it is awaited.

    launches, copies ──▶ queue ──┬─ some, at random, with each launch
                                 └─ all before a mark, when a thread or a stream waits for it

A host that changes what the device has not read yet, or reads what it has not written, computes
with wrong values. Steps that are launched one by one begin with an empty queue, except prompts of
which nothing is sampled.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import partial, wraps
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from shared.engine.executors.cuda.cuda_executor import CudaExecutor
from shared.engine.models.device_step import DeviceStepOutput
from shared.engine.step import StepInputs
from tests.shared.engine.executors.cuda.fake_device import FakeDriver, FakeEvent, Replays, load

POISON = 1  # of memory into which nothing is copied yet
EAGER = ("_operands", "output", "_keep_tokens", "zero_blocks", "capture_next", "counted_experts")


class Queue:
    """What was launched and is not done. Any thread may wait for it."""

    def __init__(self, seed: int) -> None:
        self._work = deque[Callable[[], object]]()
        self._num_launched, self._is_working = 0, False
        self._random, self._lock = random.Random(seed), RLock()

    @property
    def end(self) -> int:
        return self._num_launched

    def launch(self, work: Callable[[], object]) -> None:
        with self._lock:
            self._work.append(work)
            self._num_launched += 1
            if self._random.random() < 0.3:
                self.wait(self._num_launched - self._random.randrange(len(self._work) + 1))

    def wait(self, end: int | None = None) -> None:
        """Does the work before `end`, or all."""
        end = self._num_launched if end is None else end
        with self._lock, torch.inference_mode():
            while not self._is_working and self._work and self.num_done < end:
                self._is_working = True
                try:
                    self._work.popleft()()
                finally:
                    self._is_working = False

    @property
    def num_done(self) -> int:
        return self._num_launched - len(self._work)


class LateEvent(FakeEvent):
    def __init__(self, queue: Queue, marks: list[FakeEvent]) -> None:
        super().__init__(marks)
        self._queue, self.end = queue, 0

    def record(self) -> None:
        self.end = self._queue.end

    def synchronize(self) -> None:
        self._queue.wait(self.end)

    def query(self) -> bool:
        """The device goes on while it is asked."""
        self._queue.wait(min(self.end, self._queue.num_done + 1))
        return self._queue.num_done >= self.end


class LateStream:
    """Another stream: what is launched there is done at once."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue

    def wait_event(self, event: LateEvent) -> None:
        event.synchronize()

    def synchronize(self) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


class LateDriver(FakeDriver):
    def __init__(self, queue: Queue) -> None:
        super().__init__()
        self._queue = queue

    def Event(self) -> LateEvent:  # noqa: N802
        return LateEvent(self._queue, [])

    def Stream(self, device: int, priority: int) -> Any:  # noqa: N802
        return LateStream(self._queue)

    def stream(self, stream: Any) -> Any:
        return stream


class LateReplays(Replays):
    def __init__(self, queue: Queue) -> None:
        super().__init__()
        self._queue = queue

    def upload(self, source: Tensor, target: Tensor) -> None:
        self._queue.launch(partial(target.copy_, source))

    def download(self, values: Tensor) -> Tensor:
        host = torch.full_like(values, POISON)
        self._queue.launch(partial(host.copy_, values))
        return host

    def capture(
        self, call: partial[DeviceStepOutput]
    ) -> tuple[Callable[[], None], DeviceStepOutput]:
        self._queue.wait()
        replay, output = super().capture(call)
        return partial(self._queue.launch, replay), output


def load_late(folder: Any, seed: int, *, answers_apart: bool = False) -> CudaExecutor:
    """Returns an executor on such a device."""
    queue = Queue(seed)
    executor = load(folder, driver=LateDriver(queue), answers_apart=answers_apart)
    computer = executor.computer
    computer.use_graphs(LateReplays(queue), max_rows=16, max_graphs=12)
    graphs = computer.graphs
    for owner, name in (*((computer, each) for each in EAGER), (graphs, "_captured")):
        setattr(owner, name, _after_all(queue, getattr(owner, name)))
    copy_blocks = computer._copy_blocks

    def copied(inputs: StepInputs) -> None:
        if inputs.block_copies:
            queue.wait()
        copy_blocks(inputs)

    computer._copy_blocks = copied  # type: ignore[method-assign]
    computer._computed = _late_prompts(queue, computer._computed)  # type: ignore[method-assign]
    return executor


def _after_all(queue: Queue, call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def called(*arguments: Any, **options: Any) -> Any:
        queue.wait()
        return call(*arguments, **options)

    return called


def _late_prompts(
    queue: Queue, computed: Callable[[StepInputs], DeviceStepOutput]
) -> Callable[[StepInputs], DeviceStepOutput]:
    """Nobody reads the hidden states of a step that only stores KV."""

    def call(inputs: StepInputs) -> DeviceStepOutput:
        if inputs.sampling.num_rows or inputs.pooling or inputs.prompt_logprobs:
            return computed(inputs)
        queue.launch(partial(computed, inputs))
        return DeviceStepOutput(torch.empty(0))

    return call

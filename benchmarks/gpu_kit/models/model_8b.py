"""A model of Llama-3.1-8B's shape with dummy weights, as a worker loads it: start, decode, prefill.

`measured_ms` is the time from one step's token ids on the host to those of the next, with as many
steps in flight as the executor has; `alone_ms` that from a step's inputs to its token ids with one.
`device_ms` is between events on the device in that time, which may wait for the host's launches; a
replayed graph has none, and its device's time is `graph_step`'s.
`of_roofline`: the least time for the bytes (decode) or operations (prefill) at the ceilings, by the
measured one.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_kit import roofline
from benchmarks.gpu_kit.models import graph_step, prefill
from benchmarks.gpu_kit.session import Session

if TYPE_CHECKING:
    from benchmarks.gpu_kit.model_steps.events import StepEvents
    from shared.engine.executors.local_executor import LocalExecutor
    from shared.engine.executors.step_queue import Answer
    from shared.engine.step import StepInputs

WARM_UP_STEPS, STEPS, PROMPTS = 3, 20, 3


def run(session: Session, mode: str) -> None:
    from benchmarks.gpu_kit.model_steps.loading import load

    with folder_of(graph_step.model_config(session)) as folder:
        started = time.perf_counter()
        executor, stages = load(session, folder, mode)
        seconds = time.perf_counter() - started
    kv_tokens = executor.num_blocks * executor.kv_layout.block_size
    figures = {} if session.is_dry else {"seconds": round(seconds, 2), **stages, **memory()}
    session.add(case="start", mode=mode, kv_tokens=kv_tokens, **figures)
    asyncio.run(Measurement(session, executor, mode).run())


@contextmanager
def folder_of(config: dict[str, Any]) -> Iterator[Path]:
    """A checkpoint that consists only of its config."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(config))
        yield Path(name)


def memory() -> dict[str, float]:
    import torch

    free, total = torch.cuda.mem_get_info()
    return {
        "gib_free": round(free / 2**30, 2),
        "gib_total": round(total / 2**30, 2),
        "gib_peak": round(torch.cuda.max_memory_allocated() / 2**30, 2),
    }


class Measurement:
    """The measurement of one executor. Without a device it has no events of the device."""

    def __init__(self, session: Session, executor: LocalExecutor, mode: str) -> None:
        self._session, self._executor, self._mode = session, executor, mode
        self._block_size = executor.kv_layout.block_size
        self._events: StepEvents | None = None
        if not session.is_dry:
            from benchmarks.gpu_kit.model_steps.events import StepEvents

            self._events = StepEvents(executor.computer.model)

    async def run(self) -> None:
        shapes = self._session.shapes
        for batch, context in graph_step.decode_cases(shapes):
            heading = {"case": graph_step.case_name(batch), "context": context}
            if not self._is_left_out(heading, batch * context):
                await self._decode(heading, batch, context)
        await self._mixed(shapes.batches[1], shapes.context, min(shapes.chunks))
        for chunk in shapes.chunks:
            heading = {"case": prefill.case_name(self._session, chunk)}
            if not self._is_left_out(heading, shapes.prompt):
                await self._prefill(heading, chunk)
        await self._executor.close()

    def _is_left_out(self, heading: dict[str, Any], num_tokens: int) -> bool:
        """Adds a row with the reason."""
        room = self._executor.num_blocks * self._block_size
        reason = graph_step.reason_left_out(self._session, num_tokens, room)
        if reason:
            self._session.add(**heading, mode=self._mode, left_out=reason)
        return bool(reason)

    async def _decode(self, heading: dict[str, Any], batch: int, context: int) -> None:
        from benchmarks.gpu_kit.model_steps.inputs import after_another, decode_step

        session, step = self._session, decode_step(batch, context, self._block_size)
        roof_s = roofline.decode_s(session, session.shapes.config, batch, context)
        told = {
            "mode": self._mode,
            "predicted_s": roof_s,
            "kernels": graph_step.KERNELS[self._mode],
        }
        if session.is_dry:
            await self._timed([step])
            session.add(**heading, **told, measured_s=None)
            return
        alone = [await self._timed([step]) for _ in range(WARM_UP_STEPS + STEPS)][-STEPS:]
        following = after_another(step) if self._executor.depth > 1 else step
        took = (await self._in_flight([step, *[following] * (WARM_UP_STEPS + STEPS)]))[-STEPS:]
        step_s = statistics.median(took)
        session.add(
            **heading,
            **told,
            measured_s=step_s,
            tokens_per_s=round(batch / step_s, 1),
            slowest_ms=round(max(took) * 1e3, 3),
            alone_ms=round(statistics.median(seconds for seconds, _ in alone) * 1e3, 3),
            is_replayed=not alone[-1][1],
            **medians([stages for _, stages in alone]),
        )

    async def _mixed(self, batch: int, context: int, num_tokens: int) -> None:
        """Measures what graphs do not cover: whether the host's launches end before the device."""
        from benchmarks.gpu_kit.model_steps.inputs import mixed_step

        session = self._session
        heading = {"case": f"{num_tokens} of a prompt beside {batch} decodes", "context": context}
        if self._is_left_out(heading, (batch + 1) * context):
            return
        step = mixed_step(batch, context, num_tokens, self._block_size)
        steps = [step] * (1 if session.is_dry else WARM_UP_STEPS + PROMPTS)
        alone_s, stages = await self._timed(steps[:1])
        took = [] if session.is_dry else (await self._in_flight(steps))[-PROMPTS:]
        session.add(
            **heading,
            mode=self._mode,
            predicted_s=roofline.mixed_s(
                session, session.shapes.config, batch, context, num_tokens
            ),
            measured_s=min(took, default=None),
            kernels=(*prefill.KERNELS[self._mode], "decode_attention"),
            **({} if session.is_dry else {"alone_ms": round(alone_s * 1e3, 3)}),
            **medians([stages]),
        )

    async def _prefill(self, heading: dict[str, Any], chunk: int) -> None:
        from benchmarks.gpu_kit.model_steps.inputs import prefill_steps

        session, shapes = self._session, self._session.shapes
        steps = prefill_steps(shapes.prompt, chunk, self._block_size)
        alone_s, stages = await self._timed(steps)
        num_prompts = 0 if session.is_dry else PROMPTS
        took = [sum(await self._in_flight(steps)) for _ in range(num_prompts)]
        alone = {} if session.is_dry else {"alone_ms": round(alone_s * 1e3, 3)}
        session.add(
            **heading,
            mode=self._mode,
            predicted_s=roofline.prefill_s(session, shapes.config, shapes.prompt),
            measured_s=min(took, default=None),
            kernels=prefill.KERNELS[self._mode],
            **alone,
            **medians([stages]),
        )

    async def _in_flight(self, steps: Sequence[StepInputs]) -> list[float]:
        """Returns the seconds until each step's tokens, since those of the one before."""
        answers: deque[Answer] = deque()
        took, ended = list[float](), time.perf_counter()
        for step in [*steps, *[None] * self._executor.depth]:
            if step is not None:
                answers.append(self._executor.start(step))
            if answers and (step is None or len(answers) == self._executor.depth):
                await answers.popleft()()
                took.append(time.perf_counter() - ended)
                ended += took[-1]
        return took

    @property
    def _num_replayed(self) -> int:
        graphs = getattr(self._executor.computer, "graphs", None)
        return 0 if graphs is None else int(graphs.num_replayed)

    async def _timed(self, steps: Sequence[StepInputs]) -> tuple[float, dict[str, float]]:
        """Returns the seconds of all steps, and the milliseconds of each stage on the device."""
        seconds, stages = 0.0, defaultdict[str, float](float)
        for step in steps:
            num_replayed, started = self._num_replayed, time.perf_counter()
            await self._executor.run(step)
            seconds += time.perf_counter() - started
            if self._events is not None and self._num_replayed == num_replayed:
                for stage, each in self._events.milliseconds().items():
                    stages[stage] += each
        return seconds, stages


def medians(took: Sequence[dict[str, float]]) -> dict[str, float]:
    """Returns the columns: of each stage, and of their sum."""
    if not took[0]:
        return {}
    sums = statistics.median(sum(stages.values()) for stages in took)
    each = {stage: statistics.median(stages[stage] for stages in took) for stage in took[0]}
    return {"device_ms": round(sums, 4), **{f"{k}_ms": round(v, 4) for k, v in each.items()}}

"""The time of each kernel of an eager decode step, by torch's profiler.

Copies count as kernels. `of_step`: the share of the device's busy time; without the figures of a
profiler, which some runtimes do not allow, the part is unavailable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, get_args

import torch

from benchmarks.gpu_kit.models.dummy_model import make_executor
from benchmarks.gpu_kit.models.graph_step import fill_kv
from benchmarks.gpu_kit.session import Session, Unavailable

BATCHES = (1, 64)
STEPS = 5
MOST_KERNELS = 30  # most rows of a table
DRY_LAYERS = 1


def run(session: Session) -> None:
    from benchmarks.gpu_kit.model_steps.inputs import decode_step
    from shared.engine.executors.loading.model_loading import set_mode
    from shared.numerics import Mode

    shapes = session.shapes
    num_layers = DRY_LAYERS if session.is_dry else shapes.layers
    executor = make_executor(
        session,
        shapes.config | {"num_hidden_layers": num_layers},
        "exact",
        num_blocks=max(BATCHES) * -(-shapes.context // shapes.block_size),
        num_positions=shapes.context,
    )
    fill_kv(session, executor)
    for mode in get_args(Mode):
        set_mode(executor.model, mode)
        for batch in BATCHES:
            step = decode_step(batch, shapes.context, shapes.block_size)
            add_table(session, f"{mode}, batch {batch}", lambda: executor.run(step))  # noqa: B023


def add_table(session: Session, case: str, step: Callable[[], object]) -> None:
    """A row for each kernel, the longest first, and one for their sum."""
    step()
    if session.is_dry:
        return
    step()
    kernels = profiled(session, step)
    if not kernels:
        raise Unavailable("torch's profiler shows no kernels here")
    busy_us = sum(each["us"] for each in kernels)
    num_calls = sum(each["calls"] for each in kernels)
    session.add(case=f"{case}, all", us=round(busy_us, 1), calls=num_calls)
    for each in sorted(kernels, key=lambda each: -each["us"])[:MOST_KERNELS]:
        session.add(case=case, **each, of_step=round(each["us"] / busy_us, 4))


def profiled(session: Session, step: Callable[[], object]) -> list[dict[str, Any]]:
    """Returns the name, calls and device microseconds of each kernel, a step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(STEPS):
            step()
        session.synchronize()
    return by_kernel(found.key_averages(), STEPS)


def by_kernel(events: Iterable[Any], num_steps: int) -> list[dict[str, Any]]:
    return [
        {
            "kernel": event.key[:120],
            "calls": event.count / num_steps,
            "us": round(event.self_device_time_total / num_steps, 2),
        }
        for event in events
        if event.self_device_time_total > 0
    ]

"""The device's own time of a prompt's chunks, captured in one CUDA graph and replayed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.gpu_kit import roofline
from benchmarks.gpu_kit.models.graph_step import MODES, model_config
from benchmarks.gpu_kit.session import Session

if TYPE_CHECKING:
    from shared.engine.executors.step_computer import StepComputer
    from shared.numerics import Mode

LEAST_S = 3  # a case with less time is left out
REPETITIONS = 2
ROWS = ("rms_norm", "add_rms_norm", "rotate_and_store", "silu_and_mul", "prefill_attention")
KERNELS = {"exact": ("linear", "lane_linear", *ROWS), "fast": ROWS}


def run(session: Session) -> None:
    """The whole prompt as one chunk first, then the smallest chunks."""
    from benchmarks.gpu_kit.models.dummy_model import make_executor

    shapes = session.shapes
    num_blocks = -(-shapes.prompt // shapes.block_size)
    sizes = {"num_blocks": num_blocks, "num_positions": shapes.prompt}
    executor = make_executor(session, model_config(session), "exact", **sizes)
    whole, *others = shapes.chunks
    for chunk in (whole, *reversed(others)):
        for mode in MODES:
            if session.left_s < LEAST_S:
                heading = {"case": case_name(session, chunk), "mode": mode}
                session.add(**heading, left_out="no time left")
            else:
                measure(session, executor, mode, chunk)


def case_name(session: Session, chunk: int) -> str:
    return f"prefill of {session.shapes.prompt} in chunks of {chunk}"


def measure(session: Session, executor: StepComputer, mode: Mode, chunk: int) -> dict[str, Any]:
    """Adds the row of a prompt in chunks, and returns it."""
    from benchmarks.gpu_kit.model_steps.inputs import prefill_steps
    from benchmarks.gpu_kit.model_steps.times import count_launches, device_time
    from shared.engine.executors.loading.model_loading import set_mode
    from shared.engine.models.device_step import device_step

    set_mode(executor.model, mode)
    shapes, slots = session.shapes, executor.kv_slots()
    steps = prefill_steps(shapes.prompt, chunk, executor.kv_layout.block_size)
    inputs = [executor.device_inputs(step, samples_on_device=True) for step in steps]

    def call() -> None:
        for each in inputs:
            device_step(executor.model, slots, each)

    return session.add(
        case=case_name(session, chunk),
        mode=mode,
        **count_launches(call),
        predicted_s=roofline.prefill_s(session, shapes.config, shapes.prompt),
        kernels=KERNELS[mode],
        **device_time(session, call, REPETITIONS),
    )

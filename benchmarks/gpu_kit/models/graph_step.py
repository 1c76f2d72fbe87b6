"""The device's own time of a decode step: the engine's step, captured in a CUDA graph and replayed.

One model serves both modes. Beside each figure stands the eager step: what the host needs for its
launches decides whether graphs pay.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_kit import roofline
from benchmarks.gpu_kit.session import Session
from benchmarks.gpu_kit.shapes import Shapes

if TYPE_CHECKING:
    from shared.engine.executors.step_computer import StepComputer
    from shared.numerics import Mode

MODES: tuple[Mode, ...] = ("exact", "fast")
LEAST_S = 4  # a case with less time is left out
COMPILED_LAYERS = 2
RESERVED_BYTES = 6 << 30  # room for activations, logits and graphs
ROWS = ("rms_norm", "add_rms_norm", "rotate_and_store", "silu_and_mul", "decode_attention")
KERNELS = {"exact": ("linear", "lane_linear", *ROWS), "fast": ROWS}


def run(session: Session) -> None:
    from benchmarks.gpu_kit.models.dummy_model import make_executor

    shapes = session.shapes
    cases = decode_cases(shapes)
    num_tokens = kv_room(session, cases)
    num_blocks = -(-num_tokens // shapes.block_size)
    sizes = {"num_blocks": num_blocks, "num_positions": shapes.context}
    executor = make_executor(session, model_config(session), "exact", **sizes)
    fill_kv(session, executor)
    for batch, context in cases:
        for mode in MODES:
            left_out = reason_left_out(session, batch * context, num_tokens)
            if left_out:
                heading = {"case": case_name(batch), "mode": mode, "context": context}
                session.add(**heading, left_out=left_out)
            else:
                measure(session, executor, mode, batch, context)


def decode_cases(shapes: Shapes) -> list[tuple[int, int]]:
    """Returns pairs of batch and context. The largest batch has half of the context first,
    which fits any card.
    """
    largest = max(shapes.batches)
    halves = [(largest, shapes.context // 2)]
    cases = [(batch, shapes.context) for batch in shapes.batches]
    return [each for case in cases for each in (*(halves if case[0] == largest else ()), case)]


def model_config(session: Session) -> dict[str, Any]:
    """Returns the model's config, with fewer layers if kernels are only compiled: all layers launch
    the same kernels.
    """
    layers = {"num_hidden_layers": COMPILED_LAYERS} if session.mode == "compile" else {}
    return session.shapes.config | layers


def case_name(batch: int) -> str:
    return f"decode, batch {batch}"


def reason_left_out(session: Session, num_tokens: int, room: int) -> str:
    """Returns why a case with so many tokens of KV is not measured; empty if it is."""
    if num_tokens > room and not session.is_dry:
        return "too few KV blocks"
    return "no time left" if session.left_s < LEAST_S else ""


def kv_room(session: Session, cases: Sequence[tuple[int, int]]) -> int:
    """Returns the tokens of the largest case that fits the device beside the weights; of the
    smallest in a dry run, where nothing reads them.
    """
    tokens = [batch * context for batch, context in cases]
    if session.is_dry:
        return min(tokens)
    import torch

    config = session.shapes.config
    free, _ = torch.cuda.mem_get_info()
    room = free - roofline.weight_bytes(config) - RESERVED_BYTES
    token_bytes = roofline.kv_bytes_per_token(config)
    return max((each for each in tokens if each * token_bytes <= room), default=min(tokens))


def fill_kv(session: Session, executor: StepComputer) -> None:
    """Random keys and values: a GPU is faster on zeros."""
    if not session.is_dry:
        for slot in executor.kv_cache.unbind(0):
            slot.normal_()


def measure(
    session: Session, executor: StepComputer, mode: Mode, batch: int, context: int
) -> dict[str, Any]:
    """Adds the row of a decode step, and returns it."""
    from shared.engine.executors.loading.model_loading import set_mode

    set_mode(executor.model, mode)
    return session.add(
        case=case_name(batch),
        mode=mode,
        context=context,
        predicted_s=roofline.decode_s(session, session.shapes.config, batch, context),
        kernels=KERNELS[mode],
        **_times(session, executor, batch, context),
    )


def _times(session: Session, executor: StepComputer, batch: int, context: int) -> dict[str, Any]:
    """Returns the columns of a row: launches, the device's and the host's time."""
    from benchmarks.gpu_kit.model_steps.inputs import decode_step
    from benchmarks.gpu_kit.model_steps.times import count_launches, device_time, host_time
    from shared.engine.models.device_step import device_step

    step = decode_step(batch, context, executor.kv_layout.block_size)
    inputs = executor.device_inputs(step, samples_on_device=True)
    call = partial(device_step, executor.model, executor.kv_slots(), inputs)
    launches = count_launches(call)
    of_host = host_time(session, call, sum(launches.values()))
    return {**launches, **of_host, **device_time(session, call)}

"""The row of `shared/engine/modes.json` for this device: whether exact results are exact, and what
they cost. Reads the figures of `graph_step` and `prefill` and the verdict of `bits`, and measures
the figures that are missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.gpu_kit.models import graph_step, prefill
from benchmarks.gpu_kit.models.graph_step import MODES
from benchmarks.gpu_kit.session import Row, Session

Figure = tuple[str, str]  # a row's case and mode


def run(session: Session) -> None:
    """Adds the row of the mode or, if a figure or the verdict is missing, a row that names it."""
    wanted = wanted_figures(session)
    found = {**figures(session, "graph_step"), **figures(session, "prefill")}
    if any(each not in found for each in wanted):
        found |= _measured(session, [each for each in wanted if each not in found])
    is_exact = verdict(session.rows_of("bits"))
    missing = [", ".join(each) for each in wanted if each not in found]
    missing += ["the verdict of the part bits"] if is_exact is None else []
    if is_exact is None or missing:
        session.add(case="no mode", missing=missing)
        return
    session.add(mode_row(session, found, has_passed_bit_tests=is_exact), case="mode")


def mode_row(
    session: Session, milliseconds: dict[Figure, float], *, has_passed_bit_tests: bool
) -> dict[str, Any]:
    """Returns the fields of `MeasuredDevice`."""
    import msgspec

    from kernels.device import compute_capability
    from shared.engine.executors.loading.mode_choice import MeasuredDevice
    from shared.numerics import TRITON_KERNELS_VERSION

    cases = {case for case, _ in wanted_figures(session)}
    cost = max(milliseconds[case, "exact"] / milliseconds[case, "fast"] for case in cases)
    device = f"sm{compute_capability(session.device)}"
    row = MeasuredDevice(device, TRITON_KERNELS_VERSION, has_passed_bit_tests, round(cost, 3))
    return msgspec.structs.asdict(row)


def wanted_figures(session: Session) -> list[Figure]:
    """Returns decode of a single sequence and of many, and a long prompt, in both modes."""
    cases = [graph_step.case_name(batch) for batch in session.shapes.batches[:2]]
    cases.append(prefill.case_name(session, session.shapes.chunks[0]))
    return [(case, mode) for case in cases for mode in MODES]


def figures(session: Session, part: str) -> dict[Figure, float]:
    """Returns the milliseconds of the device, of graphs alone: eager steps may wait for the
    host.
    """
    return {
        (row["case"], row["mode"]): row["measured_ms"]
        for row in session.rows_of(part)
        if row.get("is_captured") and "mode" in row
    }


def verdict(rows: Sequence[Row]) -> bool | None:
    """Returns the last final verdict on exactness, or None if there is none."""
    final = [row for row in rows if row["case"] == "verdict" and row["state"] == "final"]
    return final[-1].get("exact") if final else None


def _measured(session: Session, missing: Sequence[Figure]) -> dict[Figure, float]:
    from benchmarks.gpu_kit.models.dummy_model import make_executor

    shapes = session.shapes
    num_tokens = max(shapes.prompt, shapes.batches[1] * shapes.context)
    num_blocks = -(-num_tokens // shapes.block_size)
    sizes = {"num_blocks": num_blocks, "num_positions": max(shapes.prompt, shapes.context)}
    executor = make_executor(session, graph_step.model_config(session), "exact", **sizes)
    graph_step.fill_kv(session, executor)
    for case, mode in missing:
        if session.left_s > graph_step.LEAST_S:
            _measure(session, executor, case, mode)
    return figures(session, session.part)


def _measure(session: Session, executor: Any, case: str, mode: Any) -> None:
    shapes = session.shapes
    for batch in shapes.batches[:2]:
        if case == graph_step.case_name(batch):
            graph_step.measure(session, executor, mode, batch, shapes.context)
            return
    prefill.measure(session, executor, mode, shapes.chunks[0])

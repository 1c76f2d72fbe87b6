"""`auto` is exact on CPUs, and on GPUs whose row proves it at a small cost."""

from __future__ import annotations

import re

import pytest
import torch
from structlog.testing import capture_logs

from shared.engine.executors.loading import mode_choice
from shared.engine.executors.loading.mode_choice import (
    MeasuredDevice,
    measured_devices,
    reason_for_fast,
    resolve_mode,
)
from shared.numerics import TRITON_KERNELS_VERSION

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def row(
    device: str = "sm90", kernels: int = TRITON_KERNELS_VERSION, **fields: object
) -> MeasuredDevice:
    given: dict[str, object] = {"has_passed_bit_tests": True, "cost": 1.2, **fields}
    return MeasuredDevice(device, kernels, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ((row(),), None),
        ((), "have not been tested on sm90"),
        ((row("sm80"),), "have not been tested on sm90"),
        ((row(kernels=TRITON_KERNELS_VERSION - 1),), "have not been tested on sm90"),
        ((row(has_passed_bit_tests=False),), "bit tests .* fail on sm90"),
        ((row(cost=1.26),), "cost 1.26 of the time on sm90"),
        ((row(cost=1.26), row(cost=1.25)), None),
    ],
)
def test_row_of_the_architecture_decides(
    rows: tuple[MeasuredDevice, ...], reason: str | None
) -> None:
    found = reason_for_fast("sm90", rows)
    assert (found is None) == (reason is None)
    assert re.search(reason or "", found or "")


def test_auto_is_exact_on_a_cpu_and_a_given_mode_holds() -> None:
    assert resolve_mode("auto", CPU) == "exact"
    for device in (CPU, CUDA):
        assert resolve_mode("fast", device) == "fast"
        assert resolve_mode("exact", device) == "exact"


def test_auto_on_a_gpu_without_a_row_is_fast_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mode_choice, "compute_capability", lambda device: 77)
    with capture_logs() as logged:
        assert resolve_mode("auto", CUDA) == "fast"
    assert [each["event"] for each in logged] == ["mode_chosen"]
    assert "sm77" in logged[0]["reason"]


def test_file_is_readable_and_names_a_device_once() -> None:
    rows = measured_devices()
    assert len({(each.device, each.kernels) for each in rows}) == len(rows)

"""Resolves `--mode auto`: exact where that is proven and costs at most a quarter more, else fast.

On a CPU exact results cost nothing. On CUDA a GPU's row of `shared/engine/modes.json` decides. The
row is of one version of the kernels: after a change the bit tests must pass again.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec
import structlog
import torch

from kernels.device import compute_capability
from shared.numerics import TRITON_KERNELS_VERSION, Mode, ModeChoice

log = structlog.get_logger(__name__)

MODES_FILE = Path(__file__).parents[2] / "modes.json"
MAX_COST = 1.25


class MeasuredDevice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measurements of a device. `cost` is the time in the exact mode over that in the fast one: the
    largest of decode at batch 1, decode at batch 64 and a prefill of 8k tokens.
    """

    device: str
    kernels: int
    has_passed_bit_tests: bool
    cost: float


def resolve_mode(choice: ModeChoice, device: torch.device) -> Mode:
    """Logs one line if `auto` gives fast."""
    if choice != "auto":
        return choice
    if device.type != "cuda":
        return "exact"
    reason = reason_for_fast(f"sm{compute_capability(device)}", measured_devices())
    if reason is None:
        return "exact"
    log.info("mode_chosen", mode="fast", reason=reason)
    return "fast"


def reason_for_fast(device: str, rows: tuple[MeasuredDevice, ...]) -> str | None:
    """Returns the reason that results are not exact on this architecture; None if they are."""
    found = [row for row in rows if (row.device, row.kernels) == (device, TRITON_KERNELS_VERSION)]
    if not found:
        return f"exact results of kernels {TRITON_KERNELS_VERSION} have not been tested on {device}"
    row = found[-1]
    if not row.has_passed_bit_tests:
        return f"the bit tests of kernels {TRITON_KERNELS_VERSION} fail on {device}"
    if row.cost > MAX_COST:
        return f"exact results cost {row.cost:.2f} of the time on {device}, more than {MAX_COST}"
    return None


@cache
def measured_devices() -> tuple[MeasuredDevice, ...]:
    return msgspec.json.decode(MODES_FILE.read_bytes(), type=tuple[MeasuredDevice, ...])

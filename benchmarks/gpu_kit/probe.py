"""Whether the device still computes: a sticky error of one process may have left it sick."""

from __future__ import annotations

from benchmarks.gpu_kit.session import Session

NUM_ELEMENTS = 1024


def run(session: Session) -> None:
    """Raises RuntimeError, also what CUDA raises."""
    session.need_device()
    import torch

    total = int((torch.empty(NUM_ELEMENTS, device="cuda").fill_(1) + 1).sum())
    if total != 2 * NUM_ELEMENTS:
        raise RuntimeError(f"the device added 1 and 1 {NUM_ELEMENTS} times and gave {total}")
    session.add(case="probe", is_sick=False)

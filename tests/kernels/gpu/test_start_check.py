"""The startup check passes where kernels run."""

from __future__ import annotations

import pytest
import torch

from kernels.device import check_triton


def test_check_passes(device: torch.device) -> None:
    check_triton(device)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_check_passes_on_each_device() -> None:
    for index in range(torch.cuda.device_count()):
        check_triton(torch.device("cuda", index))

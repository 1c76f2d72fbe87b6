"""A device that computes steps while KV is copied from and to it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

SIZE = 8192
PRODUCTS = 8  # of one step, together about 15 ms on an H100


@contextmanager
def busy(device: torch.device) -> Iterator[None]:
    """Meanwhile a thread launches step after step on the default stream of a CUDA device."""
    has_ended = threading.Event()
    thread = threading.Thread(target=_compute, args=(device, has_ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


def _compute(device: torch.device, has_ended: threading.Event) -> None:
    torch.cuda.set_device(device)
    matrix = torch.zeros(SIZE, SIZE, dtype=torch.bfloat16, device=device)
    while not has_ended.is_set():
        for _ in range(PRODUCTS):
            torch.mm(matrix, matrix)
        torch.cuda.current_stream().synchronize()

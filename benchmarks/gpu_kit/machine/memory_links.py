"""Memory that the host and a GPU, or two processes on one GPU, both reach."""

from __future__ import annotations

import base64
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor


@contextmanager
def registered_memfd(num_bytes: int) -> Iterator[Tensor]:
    """Shared memory of the host that the GPU copies from and to directly. Raises RuntimeError,
    OSError.
    """
    descriptor = os.memfd_create("gpu_kit")
    try:
        os.ftruncate(descriptor, num_bytes)
        memory = mmap.mmap(descriptor, num_bytes)
    finally:
        os.close(descriptor)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    cudart: Any = torch.cuda.cudart()
    if code := int(cudart.cudaHostRegister(tensor.data_ptr(), num_bytes, 0)):
        with suppress(RuntimeError):  # CUDA keeps the error for the next launch, of another row
            torch.ones(1, device="cuda")
        torch.cuda.check_error(code)
    try:
        yield tensor
    finally:
        cudart.cudaHostUnregister(tensor.data_ptr())


def share(tensor: Tensor) -> list[Any]:
    """Returns, as JSON values, a handle by which another process opens the tensor's memory.

    The tensor must remain allocated meanwhile.
    """
    parts: Any = tensor.untyped_storage()._share_cuda_()
    return [to_json(part) for part in parts]


def open_shared(parts: list[Any]) -> Tensor:
    """Returns the memory as bytes."""
    torch.cuda.init()  # opening memory does not
    new: Any = torch.UntypedStorage._new_shared_cuda
    storage = new(*(from_json(part) for part in parts))
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def to_json(part: Any) -> Any:
    return {"base64": base64.b64encode(part).decode()} if isinstance(part, bytes) else part


def from_json(part: Any) -> Any:
    return base64.b64decode(part["base64"]) if isinstance(part, dict) else part

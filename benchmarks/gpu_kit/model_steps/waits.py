"""Finds what in a function waits for the device, or copies from the host: a graph allows neither.

torch's operations are watched twice: as they are called, since `tolist` and `numpy` read memory
directly, and as they are dispatched, since methods like `bool` and `index` are made of others.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[3]
SOURCES = tuple(str(ROOT / name) for name in ("shared", "kernels"))
CALLED = (Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.pin_memory)
DISPATCHED = {
    "aten._local_scalar_dense.default",
    "aten._unique2.default",
    "aten.bincount.default",
    "aten.equal.default",
    "aten.lift_fresh.default",  # a tensor of values of the host
    "aten.masked_select.default",
    "aten.nonzero.default",
    "aten.repeat_interleave.Tensor",
}
COPIES = {"_to_copy", "copy_"}
INDEXED = {"index", "index_put", "index_put_"}


class _Waits(Exception):
    """The message is the operation."""


class _Called(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in CALLED:
            raise _Waits(f"Tensor.{func.__name__}")
        return func(*args, **(kwargs or {}))


class _Dispatched(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Otherwise torch imports its compiler for a mode, which takes seconds."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if str(func) in DISPATCHED or _is_waiting(func.overloadpacket.__name__, args, kwargs):
            raise _Waits(str(func))
        return func(*args, **kwargs)


def first_wait(function: Callable[[], object]) -> str | None:
    """Calls the function up to the first such operation. Returns this, with the line of the
    engine that calls it; None if there is none.
    """
    try:
        with _Called(), _Dispatched():
            function()
    except _Waits as found:
        return f"{found} in {_place(found)}"
    return None


def _is_waiting(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether it is a copy between devices, or an index whose size is read from the device."""
    if name in COPIES:
        target = args[0].device if name == "copy_" else kwargs.get("device")
        source = args[1] if name == "copy_" else args[0]
        return target is not None and target != source.device
    return name in INDEXED and any(map(_is_mask, args[1]))


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [each for each in frames if each.filename.startswith(SOURCES)]
    if not own:
        return "no line of the engine"
    return f"{Path(own[-1].filename).relative_to(ROOT)}:{own[-1].lineno}"

"""The number of rows up to which a GEMM with a split weight decodes the weight in the kernel.

`compressed_linear` decodes each tile of the weight once for every tile of rows, and streams three
quarters of the bytes; beyond some number of rows it is faster to decompress the weight once and to
multiply with the dense one. This number depends on shape and device: it is measured the first time
that a shape is multiplied, and stored in `fused_rows.json` of the cache directory.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from pathlib import Path

import torch
import triton
from torch import Tensor

from kernels.cache import cache_root
from kernels.device import computing_device

NUM_ROWS = (16, 32, 64, 128, 256, 512, 1024)
DEFAULT = 64  # if nothing can be measured: without CUDA, on meta, or during graph capture
WARMUP_MS, MEASURED_MS = 3, 15
SOURCES = ("compressed_linear", "decompress", "fused_rows", "linear", "linear_tile", "split_tile")

Product = Callable[[Tensor], object]


class FusedRows:
    """The measurements, by device, kernels and shape. Raises nothing: they only affect speed.

    An unreadable file counts as empty; a failed write is ignored.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._measured = _read(path)

    def __contains__(self, case: str) -> bool:
        return case in self._measured

    def of(self, case: str, measure: Callable[[], int]) -> int:
        if case not in self._measured:
            found = measure()
            self._measured = _read(self._path) | self._measured | {case: found}
            _write(self._path, self._measured)
        return self._measured[case]


def max_fused_rows(is_fused_faster: Callable[[int], bool]) -> int:
    """Returns the last of NUM_ROWS before the fused GEMM becomes slower; 0: it is never faster."""
    most = 0
    for num_rows in NUM_ROWS:
        if not is_fused_faster(num_rows):
            break
        most = num_rows
    return most


def fused_rows(
    weight_shape: tuple[int, int], device: torch.device, mode: str, fused: Product, dense: Product
) -> int:
    """Returns the number for GEMMs with BF16 rows; `fused` and `dense` are the two implementations.

    `mode` distinguishes GEMMs whose times differ for other reasons.
    """
    measured_on = computing_device(device)
    if measured_on.type != "cuda":
        return DEFAULT
    case = f"{_device_case(measured_on)} {mode} {weight_shape[0]} x {weight_shape[1]}"
    known = _known()
    if case not in known and (device.type == "meta" or torch.cuda.is_current_stream_capturing()):
        return DEFAULT

    def is_fused_faster(num_rows: int) -> bool:
        x = torch.randn(num_rows, weight_shape[1], device=device).bfloat16()
        return _milliseconds(lambda: fused(x)) <= _milliseconds(lambda: dense(x))

    try:
        return known.of(case, lambda: max_fused_rows(is_fused_faster))
    except torch.OutOfMemoryError:  # the KV cache left no memory to measure in
        return DEFAULT


def _milliseconds(launch: Callable[[], object]) -> float:
    from triton.testing import do_bench

    median = do_bench(launch, warmup=WARMUP_MS, rep=MEASURED_MS, return_mode="median")
    return float(median)


@cache
def _known() -> FusedRows:
    return FusedRows(cache_root() / "fused_rows.json")


@cache
def _device_case(device: torch.device) -> str:
    """Returns the part of a case's name that identifies device, Triton version and kernel
    sources.
    """
    digest = blake2b(digest_size=8)
    for name in SOURCES:
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    return f"{torch.cuda.get_device_name(device)} {triton.__version__} {digest.hexdigest()}"


def _read(path: Path) -> dict[str, int]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    pairs = found.items() if isinstance(found, dict) else ()
    return {case: rows for case, rows in pairs if type(rows) is int}


def _write(path: Path, measured: dict[str, int]) -> None:
    """Writes atomically: other workers read the file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with os.fdopen(descriptor, "w") as file:
            json.dump(measured, file, indent=1, sort_keys=True)
        Path(temporary).replace(path)
    except OSError:
        return

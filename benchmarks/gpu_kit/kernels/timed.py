"""A kernel's time on the device beside what its bytes and operations take at the ceilings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any, TypeVar

from benchmarks.gpu_kit.session import Session

COLD_BYTES = 256 << 20  # more than any L2 cache: operands that take turns are not in it
MOST_COPIES = 16

T = TypeVar("T")


def add_time(
    session: Session,
    case: str,
    launch: Callable[[], object],
    *,
    num_bytes: float,
    flops: float = 0.0,
    library: Callable[[], object] | None = None,
    kernels: Sequence[str] = (),
    **columns: Any,
) -> None:
    """Adds a row. `library` is torch's own operation, whose time is shown beside; not
    without a device.
    """
    measured_s = session.seconds(launch)
    session.add(
        case=case,
        predicted_s=at_ceilings(session, num_bytes, flops),
        measured_s=measured_s,
        gb_s=None if measured_s is None else round(num_bytes / measured_s / 1e9, 1),
        tflop_s=None if measured_s is None else round(flops / measured_s / 1e12, 2),
        library_ms=None if library is None else _milliseconds(session, library),
        kernels=kernels,
        **columns,
    )


def at_ceilings(session: Session, num_bytes: float, flops: float) -> float:
    """Returns the seconds: the longer of the two. NaN where the ceilings are unknown."""
    by_bytes = num_bytes / session.ceiling("copy_bytes_s")
    return max(by_bytes, flops / session.ceiling("matmul_flops"))


def _milliseconds(session: Session, call: Callable[[], object]) -> float | None:
    if session.is_dry:
        return None
    found = session.seconds(call)
    return None if found is None else round(found * 1e3, 4)


def in_turn(session: Session, make: Callable[[int], T], num_bytes: int) -> Callable[[], T]:
    """Returns the copies, each of `num_bytes`, in turn; each call finds its own out of the cache.
    `make` takes a seed.
    """
    num_copies = 1 if session.is_dry else min(MOST_COPIES, 1 + COLD_BYTES // num_bytes)
    copies = cycle([make(seed) for seed in range(num_copies)])
    return lambda: next(copies)

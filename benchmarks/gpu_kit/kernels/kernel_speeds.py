"""Kernels compared with libraries and a copy: `benchmarks/kernels`, the key ones first.

Without a device, one benchmark is launched at a small shape.
"""

from __future__ import annotations

from dataclasses import asdict, is_dataclass
from typing import Any

from benchmarks.gpu_kit.failures import raise_for, recorded
from benchmarks.gpu_kit.session import Session

# Products with split weights are a separate part.
FIRST = ("linear", "decode_attention", "prefill_attention", "rms_norm", "sample", "gather_blocks")
APART = ("compressed_linear", "decompress")
SMALL = ((64, 256),)  # shapes


def run(session: Session, which: str = "") -> None:
    """Measures the kernels for split weights if `which` is "split_products", else all others."""
    from benchmarks.kernels.table import OPS

    if session.is_dry:
        list(OPS["decompress" if which else "rms_norm"](SMALL))
        return
    session.need_device()
    others = sorted(OPS.keys() - {*FIRST, *APART})
    measure(session, list(APART) if which else [*FIRST, *others])


def measure(session: Session, op_names: list[str]) -> None:
    """Reports a failing op and continues with the others. Raises RuntimeError at the end."""
    import torch

    failed: list[str] = []
    for op_name in op_names:
        with recorded(session, op_name, failed):
            measure_op(session, op_name)
        torch.cuda.empty_cache()
    raise_for(failed)


def measure_op(session: Session, op_name: str) -> None:
    from benchmarks.kernels.table import OPS

    bars = []
    for row, found in OPS[op_name]():
        session.add(op=op_name, kernels=(op_name,), **row)
        bars += found
    for bar in bars:
        session.add(op=op_name, bar=columns(bar))


def columns(bar: Any) -> dict[str, Any]:
    if is_dataclass(bar) and not isinstance(bar, type):
        return asdict(bar)
    return {name: getattr(bar, name) for name in bar.__struct_fields__}

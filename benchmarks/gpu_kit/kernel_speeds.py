"""Kernels compared with libraries and a copy: `benchmarks/kernels`, the key ones first."""

from __future__ import annotations

import traceback
from dataclasses import asdict, is_dataclass
from typing import Any

from benchmarks.gpu_kit.session import Session

# Products with split weights are a separate part.
FIRST = ("linear", "decode_attention", "prefill_attention", "rms_norm", "sample", "gather_blocks")
APART = ("compressed_linear", "decompress")


def run(session: Session, which: str = "") -> None:
    """`which`: "split_products" runs only those."""
    from benchmarks.gpu import op_names

    session.need_device()
    others = [name for name in op_names() if name not in (*FIRST, *APART)]
    measure(session, list(APART) if which else [*FIRST, *others])


def measure(session: Session, op_names: list[str]) -> None:
    """Reports a failing op and continues with the others. Raises RuntimeError at the end."""
    import torch

    from benchmarks.gpu import rows_of

    failed = []
    for op_name in op_names:
        rows: list[dict[str, Any]] = []
        try:
            module, found = rows_of(op_name)
            for row in found:
                rows.append(row)
                session.add(op=op_name, **row)
            for bar in module.bars(rows):
                session.add(op=op_name, bar=columns(bar))
        except Exception as error:
            traceback.print_exc()
            session.add(op=op_name, error=f"{type(error).__name__}: {error}"[:500])
            failed.append(op_name)
        torch.cuda.empty_cache()
    if failed:
        raise RuntimeError(f"failed: {', '.join(failed)}")


def columns(bar: Any) -> dict[str, Any]:
    if is_dataclass(bar) and not isinstance(bar, type):
        return asdict(bar)
    return {name: getattr(bar, name) for name in bar.__struct_fields__}

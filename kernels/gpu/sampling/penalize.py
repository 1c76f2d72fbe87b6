"""Lowers the logits of a sequence's existing tokens, in place: one thread per entry.

    x' = (x / repetition if x > 0 else x · repetition) - subtracted

Rounded after each operation, like the reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.check_tensor import expect
from kernels.integers import cdiv

BLOCK = 256
LARGEST = tl.constexpr(3.4028234663852886e38)


def penalize(
    logits: Tensor, rows: Tensor, token_ids: Tensor, repetition: Tensor, subtracted: Tensor
) -> None:
    """Computes kernels.torch_ops.penalize with Triton. Raises BadTensor. Out-of-range indices are
    not checked: that would synchronise with the device.
    """
    expect("logits", logits, (None, None), dtype=torch.float32)
    integers = {"rows": rows, "token_ids": token_ids}
    floats = {"repetition": repetition, "subtracted": subtracted}
    for columns, dtype in ((integers, torch.int64), (floats, torch.float32)):
        for name, column in columns.items():
            expect(
                name, column, (len(rows),), dtype=dtype, device=logits.device, is_contiguous=True
            )
    if not len(rows):
        return
    _penalize_kernel[(cdiv(len(rows), BLOCK),)](
        *(logits, rows, token_ids, repetition, subtracted),
        *(logits.stride(0), len(rows)),
        BLOCK=BLOCK,
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=["num_entries"])
def _penalize_kernel(
    logits_ptr,
    rows_ptr,
    token_ids_ptr,
    repetition_ptr,
    subtracted_ptr,
    stride_logits_row,
    num_entries,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    is_entry = entry < num_entries
    row = tl.load(rows_ptr + entry, mask=is_entry, other=0)
    token = tl.load(token_ids_ptr + entry, mask=is_entry, other=0)
    repetition = tl.load(repetition_ptr + entry, mask=is_entry, other=1.0)
    subtracted = tl.load(subtracted_ptr + entry, mask=is_entry, other=0.0)
    place = logits_ptr + row * stride_logits_row + token
    x = tl.load(place, mask=is_entry, other=0.0)
    x = tl.where(x < 0, x * repetition, tl.div_rn(x, repetition)) - subtracted
    x = tl.clamp(x, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(place, x, mask=is_entry)

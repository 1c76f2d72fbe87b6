"""Excludes the tokens that a mask forbids, in place: one program per piece of a row.

    x' = x if bit t % 32 of word t // 32 is set, else -inf,  for each token t

Logits are not read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.check_tensor import expect
from kernels.integers import cdiv, next_power_of_2

PIECE = 4096
WORD_BITS = 32
INFINITY = tl.constexpr(float("inf"))


def apply_token_mask(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Computes kernels.reference.apply_token_mask with Triton. Raises BadTensor. Out-of-range rows
    are not checked: that would synchronise with the device.
    """
    expect("logits", logits, (None, None), dtype=torch.float32)
    vocab_size = logits.shape[1]
    num_words = cdiv(vocab_size, WORD_BITS)
    columns = {
        "rows": (rows, (None,), torch.int64),
        "words": (words, (len(rows), num_words), torch.int32),
    }
    for name, (column, shape, dtype) in columns.items():
        expect(name, column, shape, dtype=dtype, device=logits.device, is_contiguous=True)
    if not len(rows):
        return
    piece = min(PIECE, max(WORD_BITS, next_power_of_2(vocab_size)))
    _apply_token_mask_kernel[(cdiv(vocab_size, piece), len(rows))](
        *(logits, rows, words),
        *(logits.stride(0), num_words, vocab_size),
        PIECE=piece,
        num_warps=8,
        enable_fp_fusion=False,
    )


@triton.jit
def _apply_token_mask_kernel(
    logits_ptr,
    rows_ptr,
    words_ptr,
    stride_logits_row,
    num_words,
    vocab_size,
    PIECE: tl.constexpr,
):
    mask_row = tl.program_id(1).to(tl.int64)
    logits_ptr += tl.load(rows_ptr + mask_row) * stride_logits_row
    words_ptr += mask_row * num_words
    token = tl.program_id(0) * PIECE + tl.arange(0, PIECE)  # [PIECE]
    is_inside = token < vocab_size
    word = tl.load(words_ptr + token // 32, mask=is_inside, other=0)
    is_forbidden = (word >> (token % 32)) & 1 == 0
    tl.store(logits_ptr + token, -INFINITY, mask=is_inside & is_forbidden)

"""Parts of a weight's rows that the library multiplies by, one after the other."""

from __future__ import annotations

from itertools import pairwise

import torch

from kernels.cpu.codec.bf16_codec import BLOCK

# The library splits K among threads if a GEMM has few columns: a part of a weight needs this
# many rows per thread to give the bits of the full weight (measured: 1 and 2 threads, K <= 14,336).
THREAD_ROWS = 128
MIN_PIECE_ROWS = 256


def row_pieces(num_rows: int) -> list[tuple[int, int]]:
    """Ranges of strips of 32 rows that cover all rows."""
    num_strips = -(-num_rows // BLOCK)
    piece_rows = max(THREAD_ROWS * torch.get_num_threads(), MIN_PIECE_ROWS)
    num_pieces = max(num_rows // piece_rows, 1)
    return list(pairwise(num_strips * piece // num_pieces for piece in range(num_pieces + 1)))

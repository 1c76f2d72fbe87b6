"""Copies full blocks of the paged cache, in all layers at once, after all sources are read.

A block can be the source of one copy and the destination of another. So a program owns the same few
words of all blocks: it reads them for all copies, and only then writes. Programs share no words.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.check_tensor import INDICES, expect
from kernels.gpu.kv.kv_copy import as_words
from kernels.integers import cdiv, next_power_of_2
from kernels.torch_ops.copy_blocks import copy_blocks as copy_by_way_of_a_buffer

TILE_WORDS = 4096  # words of 8 bytes: 16 per thread of eight warps, in its registers
MAX_WORDS = 1024  # words of one block: a few copies are spread over many programs
BLOCKS_OF_COPIES = (8, 64, 512)  # few compiled kernels for all numbers of copies
MAX_COPIES = BLOCKS_OF_COPIES[-1]  # copies with 64 bytes of each block, two sectors
WORDS_PER_WARP = 512


def copy_blocks(kv_cache: Tensor, sources: Tensor, destinations: Tensor) -> None:
    """Computes kernels.torch_ops.copy_blocks with Triton. Raises BadTensor."""
    expect("kv_cache", kv_cache, (None,) * 6, is_contiguous=True)
    expect("sources", sources, (None,), dtype=INDICES, device=kv_cache.device)
    expect("destinations", destinations, sources.shape, dtype=INDICES, device=kv_cache.device)
    num_copies, num_planes = len(sources), kv_cache.shape[0] * kv_cache.shape[1]
    if not num_copies or not kv_cache.numel():
        return
    if num_copies > MAX_COPIES:
        copy_by_way_of_a_buffer(as_words(kv_cache), sources, destinations)
        return
    words = as_words(kv_cache.view(num_planes, kv_cache.shape[2], -1))
    num_words = words.shape[2]
    block_copies = next(each for each in BLOCKS_OF_COPIES if each >= num_copies)
    block_words = min(TILE_WORDS // block_copies, MAX_WORDS, next_power_of_2(num_words))
    _copy_blocks_kernel[(cdiv(num_words, block_words), num_planes)](
        *(words, sources, destinations, words.shape[1], num_copies),
        BLOCK_LENGTH=num_words,
        BLOCK_COPIES=block_copies,
        BLOCK_WORDS=block_words,
        num_warps=max(1, block_copies * block_words // WORDS_PER_WARP),
        enable_fp_fusion=True,
    )


# the second of two arrays of N indices is aligned only for even N; a cache may get another size
@triton.jit(
    do_not_specialize=["num_blocks", "num_copies"],
    do_not_specialize_on_alignment=["destinations_ptr"],
)
def _copy_blocks_kernel(
    kv_cache_ptr,
    sources_ptr,
    destinations_ptr,
    num_blocks,
    num_copies,
    BLOCK_LENGTH: tl.constexpr,
    BLOCK_COPIES: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
):
    copy = tl.arange(0, BLOCK_COPIES)[:, None]  # [BLOCK_COPIES, 1]
    source = tl.load(sources_ptr + copy, mask=copy < num_copies, other=0).to(tl.int64)
    destination = tl.load(destinations_ptr + copy, mask=copy < num_copies, other=0).to(tl.int64)
    word = tl.program_id(0) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)[None, :]  # [1, BLOCK_WORDS]
    is_copied = (copy < num_copies) & (word < BLOCK_LENGTH)  # [BLOCK_COPIES, BLOCK_WORDS]
    words_ptr = kv_cache_ptr + tl.program_id(1).to(tl.int64) * num_blocks * BLOCK_LENGTH
    words = tl.load(words_ptr + source * BLOCK_LENGTH + word, mask=is_copied)
    tl.debug_barrier()  # no thread overwrites a word that another has not read yet
    tl.store(words_ptr + destination * BLOCK_LENGTH + word, words, mask=is_copied)

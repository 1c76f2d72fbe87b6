"""The last kernel of `sample`: the first token, by noisy logits, that meets all limits."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.sampling.sample_scores import (
    INFINITY,
    LARGEST,
    distance,
    load_logits,
    min_p_bound,
    noisy,
)


@triton.jit
def _load_q(index, source, listed, HAS_MASK: tl.constexpr, CAPACITY: tl.constexpr):
    """q from a row's list, where each piece fills some of CAPACITY places, or from its tokens."""
    logits_ptr, mask_ptr, vocab_size, top, temperature = source
    is_listed, length, count_ptr, list_q_ptr, _ = listed
    if is_listed:
        count = tl.load(count_ptr + index // CAPACITY, mask=index < length, other=0)
        q = tl.load(list_q_ptr + index, mask=index % CAPACITY < count, other=INFINITY)
    else:
        x = load_logits(logits_ptr, mask_ptr, vocab_size, index, HAS_MASK)
        q = distance(x, top, temperature)
    return q


@triton.jit
def _nearer(
    limit, source, listed, HAS_MASK: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr
):
    """The number of tokens with q < limit, and their weight."""
    count, weight = tl.full((), 0, tl.int32), tl.full((), 0.0, tl.float32)
    for start in range(0, listed[1], BLOCK):
        q = _load_q(start + tl.arange(0, BLOCK), source, listed, HAS_MASK, CAPACITY)  # [BLOCK]
        count += tl.sum((q < limit).to(tl.int32), axis=0)
        weight += tl.sum(tl.where(q < limit, tl.exp(-q), 0.0), axis=0)
    return count, weight


@triton.jit
def _best(
    most,
    limit,
    key,
    token,
    source,
    listed,
    HAS_MASK: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The token with the largest noisy logit of q <= most and q < limit, and its q.

    Returns `token`, the greedy one, if there is none.
    """
    best, q_of_best = tl.full((), -INFINITY, tl.float32), tl.full((), 0.0, tl.float32)
    for start in range(0, listed[1], BLOCK):
        index = start + tl.arange(0, BLOCK)  # [BLOCK]
        q = _load_q(index, source, listed, HAS_MASK, CAPACITY)
        tokens = index
        if listed[0]:
            tokens = tl.load(listed[4] + index, mask=q < INFINITY, other=0)
        is_possible = (q <= most) & (q < limit)
        score = tl.where(is_possible, noisy(q, tokens, key), -INFINITY)
        top = tl.max(score, axis=0)
        if top > best:  # tokens ascend: of equal scores the first was found before
            is_top = score == top
            token = tl.min(tl.where(is_top, tokens, 0x7FFFFFFF), axis=0)
            q_of_best = tl.min(tl.where(is_top & (tokens == token), q, INFINITY), axis=0)
            best = top
    return token, q_of_best


@triton.jit
def sample_draw_kernel(
    logits_ptr,
    mask_ptr,
    stride_logits_row,
    stride_mask_row,
    vocab_size,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    top_ptr,
    weight_ptr,
    bound_ptr,
    key_ptr,
    piece_top_ptr,
    piece_token_ptr,
    piece_count_ptr,
    list_q_ptr,
    list_token_ptr,
    tokens_ptr,
    num_pieces,
    HAS_MASK: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK_PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        logits_ptr += row * stride_logits_row
        if HAS_MASK:
            mask_ptr += row * stride_mask_row
        place = row * num_pieces + tl.arange(0, BLOCK_PIECES)  # [BLOCK_PIECES]
        is_piece = tl.arange(0, BLOCK_PIECES) < num_pieces
        top, bound = tl.load(top_ptr + row), tl.load(bound_ptr + row)
        weight, top_p = tl.load(weight_ptr + row), tl.load(top_p_ptr + row)
        top_k = tl.load(top_k_ptr + row)
        top_k = tl.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size).to(tl.int32)
        most = min_p_bound(min_p_ptr, row)
        key = tl.load(key_ptr + row).to(tl.uint32, bitcast=True)
        token = tl.load(tokens_ptr + row).to(tl.int32)

        source = (logits_ptr, mask_ptr, vocab_size, top, temperature)
        counts = tl.load(piece_count_ptr + place, mask=is_piece, other=0)
        is_listed = (bound >= 0) & (tl.max(counts, axis=0) <= CAPACITY)
        length = tl.where(is_listed, num_pieces * CAPACITY, vocab_size)
        listed = (
            is_listed,
            length,
            piece_count_ptr + row * num_pieces,
            list_q_ptr + row * num_pieces * CAPACITY,
            list_token_ptr + row * num_pieces * CAPACITY,
        )

        if (top_k < vocab_size) & (top_p < 1):  # top-p applies to the tokens within top-k
            low, high = tl.full((), 0, tl.int32), tl.full((), LARGEST, tl.int32)
            while low < high:
                middle = low + (high - low) // 2
                beyond = (middle + 1).to(tl.float32, bitcast=True)
                count, _ = _nearer(beyond, source, listed, HAS_MASK, CAPACITY, BLOCK)
                low = tl.where(count >= top_k, low, middle + 1)
                high = tl.where(count >= top_k, middle, high)
            beyond = (low + 1).to(tl.float32, bitcast=True)
            _, weight = _nearer(beyond, source, listed, HAS_MASK, CAPACITY, BLOCK)
            most = tl.minimum(most, low.to(tl.float32, bitcast=True))

        if bound >= 0:
            token, q = _best(most, INFINITY, key, token, source, listed, HAS_MASK, CAPACITY, BLOCK)
        else:
            score = tl.load(piece_top_ptr + place, mask=is_piece, other=-INFINITY)
            drawn = tl.load(piece_token_ptr + place, mask=is_piece, other=vocab_size)
            is_best = score == tl.max(score, axis=0)
            token = tl.min(tl.where(is_best, drawn, vocab_size - 1), axis=0)
            x = load_logits(logits_ptr, mask_ptr, vocab_size, token, HAS_MASK)
            q = distance(x, top, temperature)
        is_open = ((top_k < vocab_size) | (top_p < 1)) & (q > 0)
        while is_open:
            count, nearer = _nearer(q, source, listed, HAS_MASK, CAPACITY, BLOCK)
            is_beyond = (top_p < 1) & (nearer >= top_p * weight)
            is_open = (count >= top_k) | is_beyond | (q > most)
            if is_open:
                token, q = _best(most, q, key, token, source, listed, HAS_MASK, CAPACITY, BLOCK)
                is_open = q > 0
        tl.store(tokens_ptr + row, token.to(tl.int64))

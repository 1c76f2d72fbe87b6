"""Packed logprobs: equal to a list of TokenLogprobs, in a tenth of its memory."""

from __future__ import annotations

import gc
import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from shared.messages import SamplingParams, TokenLogprobs
from shared.output.packed_logprobs import PackedLogprobs, packed_bytes

fp32 = st.floats(width=32, max_value=0)
tops = st.lists(st.tuples(st.integers(0, 2**32 - 1), fp32), max_size=3)


@st.composite
def scored(draw: st.DrawFn) -> TokenLogprobs:
    pairs = draw(tops)
    return TokenLogprobs(
        draw(fp32), tuple(token_id for token_id, _ in pairs), tuple(value for _, value in pairs)
    )


@given(st.lists(scored()), st.lists(scored()), st.integers(-3, 9), st.integers(-3, 9))
def test_packed_logprobs_equal_a_list(
    first: list[TokenLogprobs], second: list[TokenLogprobs], start: int, end: int
) -> None:
    packed = PackedLogprobs(first)
    packed.extend(PackedLogprobs(second))
    expected = first + second
    assert list(packed) == expected
    assert list(packed[start:end]) == expected[start:end]
    packed.extend(second)
    assert list(packed[start:]) == (expected + second)[start:]


def test_a_token_with_20_top_logprobs_takes_less_than_200_bytes() -> None:
    num_tokens = 1000
    tracemalloc.start()
    packed = PackedLogprobs()
    try:
        for position in range(num_tokens):
            values = tuple(-float(position + rank) for rank in range(20))
            packed.append(TokenLogprobs(values[0], tuple(range(position, position + 20)), values))
        gc.collect()  # frees the tuples that Python keeps for reuse
        num_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert num_bytes / num_tokens < 200
    sampling = SamplingParams(max_tokens=num_tokens, seed=0, num_logprobs=20)
    assert packed_bytes(sampling, 1) == packed.num_bytes + 8 * num_tokens  # ids and text offsets

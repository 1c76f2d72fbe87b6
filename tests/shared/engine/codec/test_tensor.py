"""Any bytes are restored by decoding, and tensors are stored in the expected form and size."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from shared.engine.codec.byte_planes import BF16, FP16, Bytes, byte_counts, entropy_bits
from shared.engine.codec.huffman import CHUNK_BYTES, NotDecodable, encode_plane, frames_of
from shared.engine.codec.tensor import (
    AS_IS,
    MIN_SAVED_BYTES,
    EncodedTensor,
    decode_tensor,
    encode_tensor,
)
from tests.shared.engine.codec.folders import bf16, normal

DTYPES = ("BF16", "F16", "F32", "I8", "F8_E4M3", "unheard of")
# NaNs of all kinds, infinities, zeros and denormals of both signs, of both dtypes.
EXTREMES = (
    *(0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7FFF, 0xFFFF),
    *(0x03FF, 0x7C00, 0xFC00, 0x7C01, 0x7E00, 0x3F80, 0xBF80, 0x3C00),
)
few_words = st.lists(st.sampled_from(EXTREMES), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def threads() -> Iterator[Executor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


def decoded(encoded: EncodedTensor, num_bytes: int, executor: Executor) -> Bytes:
    stored = {
        plane.name: np.frombuffer(b"".join(plane.parts), np.uint8) for plane in encoded.planes
    }
    coded = [plane.name for plane in encoded.planes if plane.is_coded]
    out = np.full(num_bytes, 0xA5, np.uint8)
    decode_tensor(encoded.codec, stored, coded, out, executor)
    return out


@settings(max_examples=200, deadline=None)
@given(
    words=arrays(np.uint16, st.integers(0, 3000))
    | few_words.map(lambda w: np.array(w * 700, "u2")),
    dtype=st.sampled_from(DTYPES),
    num_cut=st.integers(0, 3),
    num_skipped=st.integers(0, 1),
)
def test_any_bytes_round_trip(
    threads: Executor, words: np.ndarray, dtype: str, num_cut: int, num_skipped: int
) -> None:
    """Also with an odd number of bytes and at an odd address."""
    data = words.view(np.uint8)[num_skipped : max(num_skipped, words.nbytes - num_cut)]
    encoded = encode_tensor(data, dtype, threads)
    np.testing.assert_array_equal(decoded(encoded, data.size, threads), data)
    assert encoded.num_bytes <= data.size


@pytest.mark.parametrize("split", [BF16, FP16], ids=lambda split: split.codec)
def test_joined_planes_restore_each_word(split) -> None:
    words = np.arange(1 << 16, dtype=np.uint16)
    low, high, joined = np.empty(1 << 16, np.uint8), np.empty(1 << 16, np.uint8), words * 0
    split.split(words, low, high)
    split.join(low, high, joined)
    np.testing.assert_array_equal(joined, words)
    if split is BF16:  # the same planes as in the engine's compressed weights
        np.testing.assert_array_equal(high, words >> 7 & 0xFF)
        np.testing.assert_array_equal(low, (words >> 8 & 0x80) | (words & 0x7F))
    else:
        np.testing.assert_array_equal(high, words >> 8)


@pytest.mark.parametrize("num_weights", [1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1])
@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_tensors_around_the_chunk_size_round_trip(
    threads: Executor, dtype: str, num_weights: int
) -> None:
    values = normal(3, num_weights)
    data = bf16(values) if dtype == "BF16" else values.astype("<f2").tobytes()
    uncompressed = np.frombuffer(data, np.uint8)
    encoded = encode_tensor(uncompressed, dtype, threads)
    assert (encoded.codec == AS_IS) is (num_weights == 1)
    np.testing.assert_array_equal(decoded(encoded, uncompressed.size, threads), uncompressed)


@pytest.mark.parametrize(("dtype", "max_bits"), [("BF16", 10.7), ("F16", 13.7)])
def test_coded_weights_are_within_3_percent_of_entropy(
    threads: Executor, dtype: str, max_bits: float
) -> None:
    values = normal(0, 300_000)
    data = bf16(values) if dtype == "BF16" else values.astype("<f2").tobytes()
    encoded = encode_tensor(np.frombuffer(data, np.uint8), dtype, threads)
    assert 8 * encoded.num_bytes / values.size < max_bits
    coded = sum(plane.num_bytes for plane in encoded.planes if plane.is_coded)
    assert coded < 1.03 * (encoded.entropy_bytes - values.size)
    assert [plane.is_coded for plane in encoded.planes] == [False, True]


def test_only_compressible_planes_are_coded(threads: Executor) -> None:
    upcast = np.frombuffer(bf16(normal(1, 40_000)), "<u2") & 0xFFF0  # three bits of mantissa
    encoded = encode_tensor(upcast.view(np.uint8), "BF16", threads)
    assert all(plane.is_coded for plane in encoded.planes)
    assert 8 * encoded.num_bytes / upcast.size < 7
    noise = np.frombuffer(np.random.default_rng(0).bytes(80_000), np.uint8)
    assert encode_tensor(noise, "BF16", threads).codec == AS_IS


def test_tensor_with_too_little_savings_is_stored_as_is(threads: Executor) -> None:
    for num_weights in (100, 10_000):
        data = np.frombuffer(bf16(normal(2, num_weights)), np.uint8)
        encoded = encode_tensor(data, "BF16", threads)
        assert (encoded.codec == AS_IS) is (num_weights == 100)
        assert encoded.codec == AS_IS or encoded.num_bytes <= data.size - MIN_SAVED_BYTES


def test_entropy_bits_is_the_shannon_entropy() -> None:
    assert entropy_bits(byte_counts(np.arange(256, dtype=np.uint8))) == 8.0
    assert entropy_bits(byte_counts(np.zeros(5, np.uint8))) == 0.0
    assert entropy_bits(byte_counts(np.empty(0, np.uint8))) == 0.0
    assert entropy_bits(byte_counts(np.array([1, 1, 2, 3], np.uint8))) == 1.5
    for num_bytes in (5, 6, 7, 1001):
        plane = np.random.default_rng(num_bytes).integers(0, 9, num_bytes).astype(np.uint8)
        expected = np.bincount(plane, minlength=256)
        np.testing.assert_array_equal(byte_counts(plane), expected)


def test_frame_of_wrong_size_is_rejected(threads: Executor) -> None:
    plane = np.frombuffer(bf16(normal(5, 3000)), np.uint8)[1::2].copy()
    coded = np.frombuffer(b"".join(encode_plane(plane, threads)), np.uint8)
    assert len(frames_of(coded, 3000)) == 1
    out = np.empty(6000, np.uint8)
    raw = np.zeros(3000, np.uint8)
    for num_words, broken, message in (
        (2999, coded, "another size"),
        (3000, coded[:-1], "lengths"),
        (3000, np.append(coded, coded[-1:]), "lengths"),
        (3000, coded[:2], "lengths"),
        (3000, coded[:0], "lengths"),
    ):
        stored = {"sign_mantissa": raw[:num_words], "exponents": broken}
        with pytest.raises(NotDecodable, match=message):
            decode_tensor("bf16-huffman", stored, ["exponents"], out[: 2 * num_words], threads)
    with pytest.raises(NotDecodable, match="3000 bytes are stored instead of 2999"):
        stored = {"sign_mantissa": raw, "exponents": raw[:2999]}
        decode_tensor("bf16-huffman", stored, [], out[:5998], threads)
    with pytest.raises(NotDecodable, match="not a multiple of 2"):
        decode_tensor("bf16-huffman", stored, [], out[:5999], threads)


def test_frame_with_huge_declared_size_is_rejected(threads: Executor) -> None:
    """RFC 8878, 3.1.1: magic, descriptor (content size in 8 bytes, one segment), size 2^50."""
    frame = bytes.fromhex("28b52ffd e0") + (1 << 50).to_bytes(8, "little") + bytes(20)
    coded = np.frombuffer(len(frame).to_bytes(4, "little") + frame, np.uint8)
    stored = {"sign_mantissa": np.zeros(3000, np.uint8), "exponents": coded}
    with pytest.raises(NotDecodable, match="another size"):
        decode_tensor("bf16-huffman", stored, ["exponents"], np.empty(6000, np.uint8), threads)

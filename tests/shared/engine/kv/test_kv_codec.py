"""Compressed KV: every bit pattern is restored, and no byte outside the buffers is accessed."""

from __future__ import annotations

from threading import Thread

import numpy as np
import pytest
from numpy.typing import NDArray

from kernels.ops import cpu_host
from shared.engine.kv.kv_codec import BLOCK_BYTES, Bf16FrameCodec
from tests.guarded import guarded
from tests.support.waiting import wait_until

Bytes = NDArray[np.uint8]
CODEC = Bf16FrameCodec()


def bf16(values: NDArray[np.float32]) -> Bytes:
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def like_kv(num_bytes: int, seed: int = 0) -> Bytes:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(-(-num_bytes // 2)).astype(np.float32)
    return bf16(values)[:num_bytes].copy()


def encoded(payload: Bytes) -> Bytes:
    """The encoded payload; empty if it would not be shorter."""
    found = []
    for is_at_end in (False, True):
        source = guarded(payload.tobytes(), is_at_end=is_at_end)
        output = guarded(payload.size, is_at_end=is_at_end)
        found.append(output[: CODEC.encode(source.data, output.data)])
    assert found[0].tobytes() == found[1].tobytes()
    return found[0]


def decoded(coded: Bytes, num_bytes: int) -> Bytes | None:
    found = []
    for is_at_end in (False, True):
        source = guarded(coded.tobytes(), is_at_end=is_at_end)
        output = guarded(num_bytes, is_at_end=is_at_end)
        found.append(output if CODEC.decode(source.data, output.data) else None)
    if found[0] is None or found[1] is None:
        assert found == [None, None]
        return None
    assert (found[0] == found[1]).all()
    return found[0]


def test_compiled_codec_waits_for_no_other_compiler() -> None:
    started: list[Bf16FrameCodec] = []
    with cpu_host().compile_lock():  # as another process that compiles
        Thread(target=lambda: started.append(Bf16FrameCodec()), daemon=True).start()
        wait_until(lambda: started)


@pytest.mark.parametrize("extra", [0, 1, 2, 63, 1024, 2047])
@pytest.mark.parametrize("num_blocks", [2, 3, 63])
def test_kv_of_any_size_is_compressed_and_restored(num_blocks: int, extra: int) -> None:
    payload = like_kv(num_blocks * BLOCK_BYTES + extra)
    coded = encoded(payload)
    assert 0 < coded.size < 0.74 * num_blocks * BLOCK_BYTES + extra + 1024
    assert (decoded(coded, payload.size) == payload).all()


def test_normal_values_take_11_to_11_5_bits_a_word() -> None:
    payload = like_kv(1 << 20)
    assert 11.0 < 16 * encoded(payload).size / payload.size < 11.5


@pytest.mark.parametrize("window", range(0, 1 << 16, 1 << 12))
def test_every_bit_pattern_is_restored(window: int) -> None:
    """Each case has 4096 patterns in every fourth word, so that the payload still shrinks."""
    words = like_kv(2 * (1 << 14), seed=window).view(np.uint16)
    words[::4] = np.arange(window, window + (1 << 12), dtype=np.uint16)
    payload = words.view(np.uint8)
    assert (decoded(encoded(payload), payload.size) == payload).all()


@pytest.mark.parametrize("byte", [0x00, 0x3F, 0x7F, 0x80, 0xFF])
def test_blocks_of_different_content_are_restored(byte: int) -> None:
    """A block of one value, one of noise and one of tiny numbers among blocks of KV."""
    payload = like_kv(16 * BLOCK_BYTES).reshape(16, BLOCK_BYTES)
    payload[3] = byte
    payload[7] = np.random.default_rng(1).integers(0, 256, BLOCK_BYTES, dtype=np.uint8)
    payload[15] = bf16(like_kv(BLOCK_BYTES).view(np.uint16).astype(np.float32) * 1e-38)
    flat = payload.reshape(-1)
    assert (decoded(encoded(flat), flat.size) == flat).all()


@pytest.mark.parametrize("num_blocks", range(1, 12))
def test_noise_after_kv_stays_within_the_buffer(num_blocks: int) -> None:
    """The verbatim bytes of the last blocks reach the end of the buffer or would exceed it."""
    for num_noisy in range(num_blocks + 1):
        payload = like_kv(num_blocks * BLOCK_BYTES).reshape(num_blocks, BLOCK_BYTES)
        payload[num_blocks - num_noisy :] = 0x7F
        payload[num_blocks - num_noisy :, 1::4] = 0x80
        flat = payload.reshape(-1)
        coded = encoded(flat)
        if coded.size:
            assert (decoded(coded, flat.size) == flat).all()


@pytest.mark.parametrize("num_bytes", [1, 2, 2047, BLOCK_BYTES, 40 * BLOCK_BYTES + 5])
def test_noise_is_not_compressed(num_bytes: int) -> None:
    noise = np.random.default_rng(2).integers(0, 256, num_bytes, dtype=np.uint8)
    assert encoded(noise).size == 0


@pytest.mark.parametrize("num_bytes", [2, BLOCK_BYTES - 1, BLOCK_BYTES])
def test_one_block_or_less_is_not_compressed(num_bytes: int) -> None:
    assert encoded(like_kv(num_bytes)).size == 0


@pytest.mark.parametrize("change", [-1, 1, -700, 700, 5000])
def test_encoding_of_wrong_length_is_rejected(change: int) -> None:
    payload = like_kv(4 * BLOCK_BYTES)
    coded = encoded(payload)
    other = coded[:change] if change < 0 else np.concatenate([coded, coded[:change]])
    assert decoded(other, payload.size) is None


@pytest.mark.parametrize("num_verbatim", [0, 1, 63, 64, 1023, 1024, 1025, 1088, 1089, 2000, 8191])
def test_encoding_with_too_few_verbatim_bytes_is_rejected(num_verbatim: int) -> None:
    """All words of all blocks are marked verbatim; the verbatim bytes are too few for them."""
    num_blocks = 8
    coded = np.zeros(num_blocks * (1 + 1408) + num_verbatim, np.uint8)
    records = coded[num_blocks : num_blocks * (1 + 1408)].reshape(num_blocks, 1408)
    records[:, 1280:] = 0xFF
    assert decoded(coded, num_blocks * BLOCK_BYTES) is None


@pytest.mark.parametrize("num_coded", [0, 1, 100, 1408, 1409, 3000])
def test_encoding_too_short_for_its_records_is_rejected(num_coded: int) -> None:
    assert decoded(np.zeros(num_coded, np.uint8), 8 * BLOCK_BYTES + 3) is None

"""When a link's frames go compressed, by table."""

from __future__ import annotations

import math

import pytest

from shared.kv_wire.compression_gate import (
    FIRST_PAUSE,
    LAST_PAUSE,
    MIN_FRAME_BYTES,
    NUM_NEEDED,
    NUM_RECENT,
    CompressionGate,
    WireTimes,
)

MB = 1_000_000
FRAME = 2 * MB


def see(
    gate: CompressionGate,
    *,
    link: float,
    encode: float = 5e9,
    decode: float = 15e9,
    ratio: float = 0.71,
    num_frames: int = NUM_RECENT,
) -> int:
    """Frames of a link and a codec of so many bytes a second; how many of them it took."""
    num_taken = 0
    for _ in range(num_frames):
        wire_bytes = FRAME
        if gate.takes(FRAME):
            num_taken += 1
            wire_bytes = int(FRAME * ratio)
            gate.encoded(FRAME, wire_bytes, FRAME / encode)
            if wire_bytes < FRAME:
                gate.decoded(FRAME, FRAME / decode)
        gate.carried(wire_bytes, wire_bytes / link)
    return num_taken


@pytest.mark.parametrize(
    ("link", "encode", "decode", "ratio", "is_on"),
    [
        (12.5e6, 5e9, 15e9, 0.71, True),  # 100 Mbit/s
        (125e6, 5e9, 15e9, 0.71, True),  # 1 Gbit/s
        (500e6, 5e9, 15e9, 0.71, True),
        (800e6, 5e9, 15e9, 0.71, False),  # 0.27 saved, 0.4 ns would have to be
        (125e6, 0.5e9, 5e9, 0.71, False),  # slow CPU: 2.3 saved of 2.2 paid
        (125e6, 1e9, 5e9, 0.71, True),
        (12.5e6, 0.05e9, 15e9, 0.71, False),
        (125e6, 5e9, 15e9, 0.99, False),  # hardly smaller
        (125e6, 5e9, 15e9, 1.0, False),  # not at all
        (4e9, 5e9, 15e9, 0.5, False),
    ],
)
def test_on_only_where_the_wire_saves_more_than_the_codec_takes(
    link: float, encode: float, decode: float, ratio: float, is_on: bool
) -> None:
    gate = CompressionGate()
    see(gate, link=link, encode=encode, decode=decode, ratio=ratio, num_frames=20)
    assert gate.is_on is is_on


def test_nothing_is_tried_before_the_link_is_known() -> None:
    gate = CompressionGate()
    assert see(gate, link=12.5e6, num_frames=NUM_NEEDED) == 0
    assert see(gate, link=12.5e6, num_frames=NUM_RECENT - 1) == NUM_RECENT - 1
    assert not gate.is_on
    assert see(gate, link=12.5e6, num_frames=1) == 1
    assert gate.is_on


def test_a_fast_link_never_carries_a_compressed_frame() -> None:
    assert see(CompressionGate(), link=2e9, num_frames=5000) == 0


def test_a_slow_codec_is_tried_a_few_times_and_then_seldom() -> None:
    gate = CompressionGate()
    slow = {"link": 125e6, "encode": 0.2e9}
    assert see(gate, **slow, num_frames=NUM_NEEDED + NUM_RECENT) == NUM_RECENT
    assert see(gate, **slow, num_frames=FIRST_PAUSE - 1) == 0
    assert see(gate, **slow, num_frames=NUM_RECENT) == NUM_RECENT
    assert see(gate, **slow, num_frames=2 * FIRST_PAUSE - 1) == 0
    see(gate, **slow, num_frames=4 * LAST_PAUSE)
    assert see(gate, **slow, num_frames=LAST_PAUSE + NUM_RECENT - 1) == NUM_RECENT


def test_a_codec_that_has_become_fast_is_found_again() -> None:
    gate = CompressionGate()
    see(gate, link=125e6, encode=0.2e9, num_frames=20)
    see(gate, link=125e6, encode=5e9, num_frames=FIRST_PAUSE + NUM_RECENT)
    assert gate.is_on


@pytest.mark.parametrize(("link", "is_on"), [(900e6, False), (620e6, True)])
def test_between_the_margins_it_stays_as_it_was(link: float, is_on: bool) -> None:
    """0.29 / link against 0.267 ns: 1.1 times that at 990 MB/s, 1.5 times at 725 MB/s."""
    off, on = CompressionGate(), CompressionGate()
    see(on, link=100e6, num_frames=20)
    for gate in (off, on):
        see(gate, link=link, num_frames=50)
    assert on.is_on
    assert off.is_on is is_on


def test_it_goes_off_when_the_link_has_become_fast() -> None:
    gate = CompressionGate()
    see(gate, link=100e6, num_frames=20)
    assert gate.is_on
    assert see(gate, link=2e9, num_frames=100) <= NUM_RECENT
    assert not gate.is_on


def test_it_goes_off_when_kv_does_not_shrink_any_more() -> None:
    gate = CompressionGate()
    see(gate, link=100e6, num_frames=20)
    see(gate, link=100e6, ratio=1.0, num_frames=NUM_RECENT)
    assert not gate.is_on


def test_a_stall_now_and_then_changes_nothing() -> None:
    gate = CompressionGate()
    for _ in range(50):
        see(gate, link=2e9, num_frames=3)
        see(gate, link=1e6, num_frames=1)
    assert not gate.is_on


def test_small_frames_are_neither_taken_nor_believed() -> None:
    gate = CompressionGate()
    for _ in range(50):
        gate.carried(MIN_FRAME_BYTES // 4, 1.0)
    assert not gate.takes(FRAME)
    see(gate, link=10e6, num_frames=20)
    assert gate.is_on
    assert not gate.takes(MIN_FRAME_BYTES - 1)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, -1.0, 1e308])
def test_a_receiver_that_lies_about_its_time_breaks_nothing(seconds: float) -> None:
    gate = CompressionGate()
    see(gate, link=10e6, num_frames=20)
    for _ in range(NUM_RECENT):
        gate.decoded(FRAME, seconds)
    see(gate, link=10e6, num_frames=3)
    assert gate.is_on is (seconds != 1e308)


def test_latency_is_no_lack_of_bandwidth() -> None:
    """Two frames under way on a link of 20 ms and 1 GB/s: 2 ms each, however long they wait."""
    times = WireTimes(round_trip_s=0.02)
    first = times.arrived(sent_at=0.0, arrived_at=0.022)
    second = times.arrived(sent_at=0.0001, arrived_at=0.024)
    late = times.arrived(sent_at=0.1, arrived_at=0.122)
    assert (first, second, late) == pytest.approx((0.002, 0.002, 0.002))


def test_a_round_trip_measured_too_long_is_corrected() -> None:
    times = WireTimes(round_trip_s=1.0)
    assert times.arrived(sent_at=0.0, arrived_at=0.001) == 0.0
    assert times.arrived(sent_at=1.0, arrived_at=1.011) == pytest.approx(0.01)

"""When a link's frames go compressed, on given times."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import pytest

from shared.kv_wire.compression_gate import (
    MIN_FRAME_BYTES,
    NUM_NEEDED,
    NUM_PAIRS,
    TRIAL_SHARE,
    UNCOMPRESSED_EVERY,
    CompressionGate,
    WireTimes,
)

MB = 1_000_000
FRAME = 2 * MB
DECIDED = NUM_NEEDED + NUM_PAIRS + 1  # frames until it is on, on a slow link
MANY = 500


@dataclass
class Seen:
    num_coded: int = 0
    seconds: float = 0.0
    plain_seconds: float = 0.0  # had no frame been compressed

    @property
    def speedup(self) -> float:
        return self.plain_seconds / self.seconds


def see(
    gate: CompressionGate,
    num_frames: int,
    *,
    link: float,
    encode: float = 5e9,
    decode: float = 15e9,
    ratio: float = 0.71,
    delay: Callable[[], float] = lambda: 0.0,
    frame_bytes: Callable[[], int] = lambda: FRAME,
    is_refused: bool = False,
) -> Seen:
    """Frames over a link and through a codec of so many bytes a second; each is delayed, too."""
    seen = Seen()
    for _ in range(num_frames):
        payload_bytes = wire_bytes = frame_bytes()
        delay_s, codec_s = delay(), 0.0
        if gate.takes(payload_bytes):
            seen.num_coded += 1
            wire_bytes = int(payload_bytes * ratio)
            codec_s = payload_bytes / encode
            gate.encoded(payload_bytes, codec_s)
            if wire_bytes == payload_bytes:
                gate.incompressible()
            elif not is_refused:
                gate.decoded(payload_bytes, payload_bytes / decode)
                codec_s += payload_bytes / decode
        if wire_bytes < payload_bytes and is_refused:
            gate.rejected(wire_bytes / link + delay_s)
        else:
            gate.carried(payload_bytes, wire_bytes, wire_bytes / link + delay_s)
        seen.seconds += wire_bytes / link + delay_s + codec_s
        seen.plain_seconds += payload_bytes / link + delay_s
    return seen


def switched_on() -> CompressionGate:
    gate = CompressionGate()
    see(gate, DECIDED, link=50e6)
    assert gate.is_on
    return gate


# ── speeds ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("link", "encode", "decode", "ratio", "is_on"),
    [
        (12.5e6, 5e9, 15e9, 0.71, True),  # 100 Mbit/s
        (125e6, 5e9, 15e9, 0.71, True),  # 1 Gbit/s
        (500e6, 5e9, 15e9, 0.71, True),
        (800e6, 5e9, 15e9, 0.71, False),  # 0.36 ns saved, 0.4 would have to be
        (125e6, 0.5e9, 5e9, 0.71, False),  # a slow sender: 2.3 ns saved, 2.2 paid
        (125e6, 5e9, 0.5e9, 0.71, False),  # a slow receiver
        (125e6, 1e9, 5e9, 0.71, True),
        (12.5e6, 0.2e9, 0.3e9, 0.71, True),  # slow hosts, and a slower link
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
    see(gate, MANY, link=link, encode=encode, decode=decode, ratio=ratio)
    assert gate.is_on is is_on


LINKS = (12.5e6, 50e6, 125e6, 312.5e6, 500e6, 800e6, 1.25e9, 3e9, 10e9)
CODECS = ((5e9, 15e9), (1e9, 3e9), (3e9, 0.3e9), (0.2e9, 5e9), (0.05e9, 0.05e9))


@pytest.mark.parametrize("delay_s", [0.0, 0.001, 0.003, 0.02, 0.2])
@pytest.mark.parametrize("is_noisy", [False, True])
def test_it_is_never_slower_and_faster_where_it_can_be(delay_s: float, is_noisy: bool) -> None:
    """Delays are a frame's, not a byte's: jitter, or a peer that comes late to its socket."""
    draw = Random(1)

    def delay() -> float:
        noise = draw.expovariate(1) if is_noisy else 1.0
        return delay_s * noise + (0.05 if is_noisy and draw.random() < 0.05 else 0.0)

    for link in LINKS:
        for encode, decode in CODECS:
            gate = CompressionGate()
            seen = see(gate, MANY, link=link, encode=encode, decode=decode, delay=delay)
            # what a trial costs at first
            unforeseen_s = 2 * (FRAME / encode + FRAME / decode) + FRAME / link + 5 * delay_s + 0.05
            bound = 1.06 if is_noisy else 1.025
            assert seen.seconds < bound * seen.plain_seconds + unforeseen_s, (link, encode, decode)
            byte_s = seen.plain_seconds / MANY / FRAME
            saved_s = 0.29 / link - 1 / encode - 1 / decode
            if saved_s > 0.15 * byte_s:
                assert seen.speedup > 0.9 * byte_s / (byte_s - saved_s), (link, encode, decode)


def test_a_delay_of_each_frame_is_no_lack_of_bandwidth() -> None:
    """6 ms for 2 MB look like 300 MB/s, but a compressed frame takes them as well."""
    gate = CompressionGate()
    seen = see(gate, MANY, link=20e9, delay=lambda: 0.006)
    assert seen.num_coded > 0
    assert not gate.is_on


def test_nothing_is_tried_before_the_link_is_known() -> None:
    gate = CompressionGate()
    assert see(gate, NUM_NEEDED, link=12.5e6).num_coded == 0
    assert see(gate, NUM_PAIRS, link=12.5e6).num_coded == NUM_PAIRS // 2
    assert not gate.is_on
    see(gate, 1, link=12.5e6)
    assert gate.is_on


def test_a_fast_link_never_carries_a_compressed_frame() -> None:
    assert see(CompressionGate(), 5000, link=2e9).num_coded == 0


def test_where_it_is_on_few_frames_go_as_they_are() -> None:
    num_frames = 10 * UNCOMPRESSED_EVERY
    assert see(switched_on(), num_frames, link=50e6).num_coded == num_frames - 10


@pytest.mark.parametrize(("encode", "decode"), [(0.5e9, 0.5e9), (5e9, 0.1e9), (0.02e9, 1e9)])
def test_trials_take_a_small_share_of_the_links_time(encode: float, decode: float) -> None:
    gate, one_s = CompressionGate(), FRAME / encode + FRAME / decode
    seen = see(gate, 10 * MANY, link=125e6, encode=encode, decode=decode)
    assert 0 < seen.num_coded * one_s < TRIAL_SHARE * seen.seconds + FRAME / 125e6 + one_s


# ── changes ──────────────────────────────────────────────────────────────────────────────────────


def test_a_codec_that_has_become_fast_is_found_again() -> None:
    gate = CompressionGate()
    see(gate, MANY, link=50e6, encode=0.1e9)
    assert not gate.is_on
    see(gate, MANY, link=50e6, encode=5e9)
    assert gate.is_on


def test_a_codec_that_has_become_slow_goes_off() -> None:
    """Its host is loaded."""
    gate = switched_on()
    assert (
        see(gate, 3 * UNCOMPRESSED_EVERY, link=50e6, encode=0.1e9).num_coded <= UNCOMPRESSED_EVERY
    )
    assert not gate.is_on


@pytest.mark.parametrize(("link", "is_on"), [(900e6, False), (620e6, True)])
def test_between_the_margins_it_stays_as_it_was(link: float, is_on: bool) -> None:
    """0.29 / link against 0.267 ns: 1.1 times that at 990 MB/s, 1.5 times at 725 MB/s."""
    off, on = CompressionGate(), switched_on()
    for gate in (off, on):
        see(gate, MANY, link=link)
    assert on.is_on
    assert off.is_on is is_on


def test_it_goes_off_at_once_when_the_link_has_become_fast() -> None:
    gate = switched_on()
    assert see(gate, 300, link=2e9).num_coded <= 6
    assert not gate.is_on


def test_it_goes_on_when_the_link_has_become_slow() -> None:
    gate = CompressionGate()
    see(gate, 300, link=2e9)
    see(gate, 2 * NUM_PAIRS, link=50e6)
    assert gate.is_on


def test_a_link_between_slow_and_fast_pays_for_no_change() -> None:
    gate = CompressionGate()
    for period in (5, 20, 100, 300):
        for _ in range(20):
            slow, fast = see(gate, period, link=100e6), see(gate, period, link=5e9)
            assert slow.speedup > 0.98
            assert fast.seconds - fast.plain_seconds < 10 * FRAME / 4e9


def test_a_slower_link_stays_compressed() -> None:
    gate = switched_on()
    for link in (25e6, 12.5e6, 100e6, 40e6):
        see(gate, 100, link=link)
        assert gate.is_on


@pytest.mark.parametrize("trouble", [{"ratio": 1.0}, {"is_refused": True}])
def test_it_goes_off_when_frames_are_encoded_for_nothing(trouble: dict[str, float]) -> None:
    gate = switched_on()
    see(gate, NUM_PAIRS // 2 + 1, link=50e6, **trouble)  # type: ignore[arg-type]
    assert not gate.is_on


def test_whoever_refuses_compressed_frames_is_seldom_sent_one() -> None:
    """It may want none of a placement; or it decodes them wrongly, and each is a handoff lost."""
    seen = see(CompressionGate(), 20 * MANY, link=50e6, is_refused=True)
    assert 0 < seen.num_coded < 0.004 * 20 * MANY


def test_what_does_not_shrink_is_seldom_encoded_for_nothing() -> None:
    seen = see(CompressionGate(), MANY, link=50e6, ratio=1.0)
    assert seen.speedup > 0.99


# ── noise and nonsense ───────────────────────────────────────────────────────────────────────────


def test_a_stall_now_and_then_changes_nothing() -> None:
    fast, slow = CompressionGate(), switched_on()
    for _ in range(50):
        see(fast, 3, link=2e9)
        see(fast, 1, link=1e6)
        see(slow, 7, link=50e6)
        see(slow, 1, link=1e6)
        assert slow.is_on
    assert not fast.is_on


def test_a_noisy_slow_link_is_compressed_most_of_the_time() -> None:
    draw, gate = Random(2), CompressionGate()
    num_frames = 3000
    seen = see(gate, num_frames, link=50e6, delay=lambda: 0.008 * draw.expovariate(1))
    assert seen.num_coded > 0.8 * num_frames


def test_small_frames_are_neither_taken_nor_believed() -> None:
    gate = CompressionGate()
    see(gate, 50, link=1e6, frame_bytes=lambda: MIN_FRAME_BYTES - 1)
    assert not gate.takes(FRAME)
    gate = switched_on()
    assert not gate.takes(MIN_FRAME_BYTES - 1)


def test_frames_without_a_neighbour_of_their_size_prove_nothing() -> None:
    sizes, gate = iter(range(FRAME, 2 * FRAME)), CompressionGate()
    seen = see(gate, MANY, link=500e6, frame_bytes=lambda: next(sizes))
    assert not gate.is_on
    assert seen.seconds < (1 + TRIAL_SHARE) * seen.plain_seconds + 2 * FRAME / 500e6


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, -1.0, 1e308])
def test_a_receiver_that_lies_about_its_time_breaks_nothing(seconds: float) -> None:
    gate = switched_on()
    for _ in range(NUM_PAIRS):
        gate.decoded(FRAME, seconds)
    see(gate, 3, link=10e6)
    assert gate.is_on is (seconds != 1e308)


# ── the wire's time ──────────────────────────────────────────────────────────────────────────────


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


@pytest.mark.parametrize("arrived_at", [-math.inf, -1e308, 0.5, math.nan])
def test_an_arrival_that_cannot_be_breaks_nothing(arrived_at: float) -> None:
    times = WireTimes(round_trip_s=0.0)
    assert times.arrived(sent_at=1.0, arrived_at=1.5) == 0.5
    assert times.arrived(sent_at=2.0, arrived_at=arrived_at) == 0.0
    assert times.arrived(sent_at=3.0, arrived_at=3.25) == 0.25

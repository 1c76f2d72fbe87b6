"""Decisions of the compression gate, for given times of frames and codec."""

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
NUM_UNTIL_ON = NUM_NEEDED + NUM_PAIRS + 1  # frames until the gate is on, on a slow link
NUM_FRAMES = 500


@dataclass
class GateRun:
    num_coded: int = 0
    seconds: float = 0.0
    baseline_s: float = 0.0  # the time without compression

    @property
    def speedup(self) -> float:
        return self.baseline_s / self.seconds


def simulate(
    gate: CompressionGate,
    num_frames: int,
    *,
    link: float,
    encode: float = 5e9,
    decode: float = 15e9,
    ratio: float = 0.71,
    delay: Callable[[], float] = lambda: 0.0,
    frame_bytes: Callable[[], int] = lambda: FRAME,
    is_rejected: bool = False,
) -> GateRun:
    """Simulates frames. `link`, `encode`, `decode`: bytes/s; `delay`: seconds for each frame."""
    run = GateRun()
    for _ in range(num_frames):
        payload_bytes = wire_bytes = frame_bytes()
        delay_s, codec_s = delay(), 0.0
        if gate.takes(payload_bytes):
            run.num_coded += 1
            wire_bytes = int(payload_bytes * ratio)
            codec_s = payload_bytes / encode
            gate.encoded(payload_bytes, codec_s)
            if wire_bytes == payload_bytes:
                gate.incompressible()
            elif not is_rejected:
                gate.decoded(payload_bytes, payload_bytes / decode)
                codec_s += payload_bytes / decode
        if wire_bytes < payload_bytes and is_rejected:
            gate.rejected(wire_bytes / link + delay_s)
        else:
            gate.carried(payload_bytes, wire_bytes, wire_bytes / link + delay_s)
        run.seconds += wire_bytes / link + delay_s + codec_s
        run.baseline_s += payload_bytes / link + delay_s
    return run


def gate_switched_on() -> CompressionGate:
    gate = CompressionGate()
    simulate(gate, NUM_UNTIL_ON, link=50e6)
    assert gate.is_on
    return gate


# ── speeds ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("link", "encode", "decode", "ratio", "is_on"),
    [
        (12.5e6, 5e9, 15e9, 0.71, True),  # 100 Mbit/s
        (125e6, 5e9, 15e9, 0.71, True),  # 1 Gbit/s
        (500e6, 5e9, 15e9, 0.71, True),
        (800e6, 5e9, 15e9, 0.71, False),  # 0.36 ns per byte saved, 0.4 ns needed
        (125e6, 0.5e9, 5e9, 0.71, False),  # a slow sender: 2.3 ns saved, 2.2 ns spent
        (125e6, 5e9, 0.5e9, 0.71, False),  # a slow receiver
        (125e6, 1e9, 5e9, 0.71, True),
        (12.5e6, 0.2e9, 0.3e9, 0.71, True),  # slow hosts, and a slower link
        (12.5e6, 0.05e9, 15e9, 0.71, False),
        (125e6, 5e9, 15e9, 0.99, False),  # hardly smaller
        (125e6, 5e9, 15e9, 1.0, False),  # not smaller
        (4e9, 5e9, 15e9, 0.5, False),
    ],
)
def test_gate_is_on_only_if_saving_exceeds_codec_time(
    link: float, encode: float, decode: float, ratio: float, is_on: bool
) -> None:
    gate = CompressionGate()
    simulate(gate, NUM_FRAMES, link=link, encode=encode, decode=decode, ratio=ratio)
    assert gate.is_on is is_on


LINKS = (12.5e6, 50e6, 125e6, 312.5e6, 500e6, 800e6, 1.25e9, 3e9, 10e9)
CODECS = ((5e9, 15e9), (1e9, 3e9), (3e9, 0.3e9), (0.2e9, 5e9), (0.05e9, 0.05e9))


@pytest.mark.parametrize("delay_s", [0.0, 0.001, 0.003, 0.02, 0.2])
@pytest.mark.parametrize("is_noisy", [False, True])
def test_gate_is_never_slower_and_faster_if_possible(delay_s: float, is_noisy: bool) -> None:
    """Delays are per frame, not per byte: jitter, or a peer that reads its socket late."""
    rng = Random(1)

    def delay() -> float:
        noise = rng.expovariate(1) if is_noisy else 1.0
        return delay_s * noise + (0.05 if is_noisy and rng.random() < 0.05 else 0.0)

    for link in LINKS:
        for encode, decode in CODECS:
            gate = CompressionGate()
            run = simulate(gate, NUM_FRAMES, link=link, encode=encode, decode=decode, delay=delay)
            # the cost of the first trials
            trial_s = 2 * (FRAME / encode + FRAME / decode) + FRAME / link + 5 * delay_s + 0.05
            bound = 1.06 if is_noisy else 1.025
            assert run.seconds < bound * run.baseline_s + trial_s, (link, encode, decode)
            byte_s = run.baseline_s / NUM_FRAMES / FRAME
            saved_s = 0.29 / link - 1 / encode - 1 / decode
            if saved_s > 0.15 * byte_s:
                assert run.speedup > 0.9 * byte_s / (byte_s - saved_s), (link, encode, decode)


def test_delay_per_frame_does_not_count_as_low_bandwidth() -> None:
    """6 ms for 2 MB look like 300 MB/s, but a compressed frame takes 6 ms as well."""
    gate = CompressionGate()
    run = simulate(gate, NUM_FRAMES, link=20e9, delay=lambda: 0.006)
    assert run.num_coded > 0
    assert not gate.is_on


def test_no_trial_before_link_speed_is_known() -> None:
    gate = CompressionGate()
    assert simulate(gate, NUM_NEEDED, link=12.5e6).num_coded == 0
    assert simulate(gate, NUM_PAIRS, link=12.5e6).num_coded == NUM_PAIRS // 2
    assert not gate.is_on
    simulate(gate, 1, link=12.5e6)
    assert gate.is_on


def test_fast_link_never_compresses() -> None:
    assert simulate(CompressionGate(), 5000, link=2e9).num_coded == 0


def test_every_nth_frame_is_uncompressed_when_on() -> None:
    num_frames = 10 * UNCOMPRESSED_EVERY
    assert simulate(gate_switched_on(), num_frames, link=50e6).num_coded == num_frames - 10


@pytest.mark.parametrize(("encode", "decode"), [(0.5e9, 0.5e9), (5e9, 0.1e9), (0.02e9, 1e9)])
def test_trials_take_small_share_of_link_time(encode: float, decode: float) -> None:
    gate, one_s = CompressionGate(), FRAME / encode + FRAME / decode
    run = simulate(gate, 10 * NUM_FRAMES, link=125e6, encode=encode, decode=decode)
    assert 0 < run.num_coded * one_s < TRIAL_SHARE * run.seconds + FRAME / 125e6 + one_s


# ── changes ──────────────────────────────────────────────────────────────────────────────────────


def test_gate_turns_on_when_codec_becomes_fast() -> None:
    gate = CompressionGate()
    simulate(gate, NUM_FRAMES, link=50e6, encode=0.1e9)
    assert not gate.is_on
    simulate(gate, NUM_FRAMES, link=50e6, encode=5e9)
    assert gate.is_on


def test_gate_turns_off_when_codec_becomes_slow() -> None:
    """As on a loaded host."""
    gate = gate_switched_on()
    assert (
        simulate(gate, 3 * UNCOMPRESSED_EVERY, link=50e6, encode=0.1e9).num_coded
        <= UNCOMPRESSED_EVERY
    )
    assert not gate.is_on


@pytest.mark.parametrize(("link", "is_on"), [(900e6, False), (620e6, True)])
def test_gate_does_not_change_between_margins(link: float, is_on: bool) -> None:
    """The saving, 0.29 / link, is 1.1 · 0.267 ns at 990 MB/s, and 1.5 · 0.267 ns at 725 MB/s."""
    off, on = CompressionGate(), gate_switched_on()
    for gate in (off, on):
        simulate(gate, NUM_FRAMES, link=link)
    assert on.is_on
    assert off.is_on is is_on


def test_gate_turns_off_soon_when_link_becomes_fast() -> None:
    gate = gate_switched_on()
    assert simulate(gate, 300, link=2e9).num_coded <= 6
    assert not gate.is_on


def test_gate_turns_on_when_link_becomes_slow() -> None:
    gate = CompressionGate()
    simulate(gate, 300, link=2e9)
    simulate(gate, 2 * NUM_PAIRS, link=50e6)
    assert gate.is_on


def test_alternating_link_speed_costs_little() -> None:
    gate = CompressionGate()
    for period in (5, 20, 100, 300):
        for _ in range(20):
            slow, fast = simulate(gate, period, link=100e6), simulate(gate, period, link=5e9)
            assert slow.speedup > 0.98
            assert fast.seconds - fast.baseline_s < 10 * FRAME / 4e9


def test_gate_stays_on_at_other_slow_speeds() -> None:
    gate = gate_switched_on()
    for link in (25e6, 12.5e6, 100e6, 40e6):
        simulate(gate, 100, link=link)
        assert gate.is_on


@pytest.mark.parametrize("fault", [{"ratio": 1.0}, {"is_rejected": True}])
def test_gate_turns_off_when_encoding_saves_nothing(fault: dict[str, float]) -> None:
    gate = gate_switched_on()
    simulate(gate, NUM_PAIRS // 2 + 1, link=50e6, **fault)  # type: ignore[arg-type]
    assert not gate.is_on


def test_rejecting_receiver_seldom_gets_compressed_frames() -> None:
    """It may reject a placement, or decode frames wrongly: then each of them fails a handoff."""
    run = simulate(CompressionGate(), 20 * NUM_FRAMES, link=50e6, is_rejected=True)
    assert 0 < run.num_coded < 0.004 * 20 * NUM_FRAMES


def test_incompressible_frames_are_seldom_encoded() -> None:
    run = simulate(CompressionGate(), NUM_FRAMES, link=50e6, ratio=1.0)
    assert run.speedup > 0.99


# ── noise and invalid values ─────────────────────────────────────────────────────────────────────


def test_occasional_stalls_do_not_switch_gate() -> None:
    fast, slow = CompressionGate(), gate_switched_on()
    for _ in range(50):
        simulate(fast, 3, link=2e9)
        simulate(fast, 1, link=1e6)
        simulate(slow, 7, link=50e6)
        simulate(slow, 1, link=1e6)
        assert slow.is_on
    assert not fast.is_on


def test_noisy_slow_link_compresses_most_frames() -> None:
    rng, gate = Random(2), CompressionGate()
    num_frames = 3000
    run = simulate(gate, num_frames, link=50e6, delay=lambda: 0.008 * rng.expovariate(1))
    assert run.num_coded > 0.8 * num_frames


def test_small_frames_are_neither_compressed_nor_measured() -> None:
    gate = CompressionGate()
    simulate(gate, 50, link=1e6, frame_bytes=lambda: MIN_FRAME_BYTES - 1)
    assert not gate.takes(FRAME)
    gate = gate_switched_on()
    assert not gate.takes(MIN_FRAME_BYTES - 1)


def test_frames_of_unequal_sizes_do_not_turn_gate_on() -> None:
    sizes, gate = iter(range(FRAME, 2 * FRAME)), CompressionGate()
    run = simulate(gate, NUM_FRAMES, link=500e6, frame_bytes=lambda: next(sizes))
    assert not gate.is_on
    assert run.seconds < (1 + TRIAL_SHARE) * run.baseline_s + 2 * FRAME / 500e6


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, -1.0, 1e308])
def test_false_decode_times_do_not_break_gate(seconds: float) -> None:
    gate = gate_switched_on()
    for _ in range(NUM_PAIRS):
        gate.decoded(FRAME, seconds)
    simulate(gate, 3, link=10e6)
    assert gate.is_on is (seconds != 1e308)


# ── wire times ───────────────────────────────────────────────────────────────────────────────────


def test_latency_does_not_count_as_wire_time() -> None:
    """Two frames in flight on a link of 20 ms and 1 GB/s: each takes 2 ms, despite the wait."""
    times = WireTimes(round_trip_s=0.02)
    first = times.arrived(sent_at=0.0, arrived_at=0.022)
    second = times.arrived(sent_at=0.0001, arrived_at=0.024)
    late = times.arrived(sent_at=0.1, arrived_at=0.122)
    assert (first, second, late) == pytest.approx((0.002, 0.002, 0.002))


def test_too_long_round_trip_is_corrected() -> None:
    times = WireTimes(round_trip_s=1.0)
    assert times.arrived(sent_at=0.0, arrived_at=0.001) == 0.0
    assert times.arrived(sent_at=1.0, arrived_at=1.011) == pytest.approx(0.01)


@pytest.mark.parametrize("arrived_at", [-math.inf, -1e308, 0.5, math.nan])
def test_impossible_arrival_time_is_ignored(arrived_at: float) -> None:
    times = WireTimes(round_trip_s=0.0)
    assert times.arrived(sent_at=1.0, arrived_at=1.5) == 0.5
    assert times.arrived(sent_at=2.0, arrived_at=arrived_at) == 0.0
    assert times.arrived(sent_at=3.0, arrived_at=3.25) == 0.25

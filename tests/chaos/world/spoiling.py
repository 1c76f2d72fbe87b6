"""Faults of a KV frame in transit."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Literal, get_args

import msgspec

from shared.kv_wire.frames import Frame

Spoiling = Literal["flip", "label", "shorten", "cut", "noise", "twice", "swap", "late", "foreign"]
Forwarded = list[tuple[Frame, bytes]]

SPOILINGS: tuple[Spoiling, ...] = get_args(Spoiling)
FIRST_FORGED_ID = 1 << 40  # of a frame that no sender waits for
FORGED_SLOT = 0  # senders use it last


class Broken(Exception):
    """The connection ends within this frame, or after noise."""

    def __init__(self, is_noise: bool) -> None:
        self.is_noise = is_noise


class Spoiler:
    """One for all connections to a receiver. `done` counts its faults, out of `num_frames`."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)
        self._spoilings: tuple[Spoiling, ...] = ()
        self._share = 0.0
        self.num_frames = 0
        self.done: Counter[Spoiling] = Counter()

    def start(self, spoilings: tuple[Spoiling, ...], share: float) -> None:
        """Resets the counts."""
        self._spoilings, self._share = spoilings, share
        self.num_frames = 0
        self.done.clear()

    def stop(self) -> None:
        self._spoilings = ()

    def fate(self) -> Spoiling | None:
        self.num_frames += 1
        is_spared = not self._spoilings or self._rng.random() >= self._share
        return None if is_spared else self._rng.choice(self._spoilings)


class FrameForwarder:
    """The frames of one connection."""

    def __init__(self, spoiler: Spoiler) -> None:
        self._spoiler = spoiler
        self._held: Forwarded = []  # until a later frame of the same placement has passed
        self._past: Forwarded = []  # the first frame of each placement
        self._num_forged = 0

    @property
    def is_holding(self) -> bool:
        return bool(self._held)

    def forward(self, frame: Frame, payload: bytes) -> Forwarded:
        """Returns what the receiver gets instead of this frame. Raises Broken."""
        self._record(frame, payload)
        fate = self._spoiler.fate()
        if self._held and self._held[0][0].header.placement_id == frame.header.placement_id:
            self._spoiler.done["swap"] += 1
            return [(frame, payload), *self.release()]
        if fate == "swap":
            if not self._held:
                self._held = [(frame, payload)]
                return []
        elif fate is not None:
            forwarded = self._spoilt(fate, frame, payload)
            if forwarded is not None:
                self._spoiler.done[fate] += 1
                return forwarded
        return [(frame, payload)]

    def release(self) -> Forwarded:
        """Returns the frames that wait for a later one."""
        held, self._held = self._held, []
        return held

    def _record(self, frame: Frame, payload: bytes) -> None:
        placement_id = frame.header.placement_id
        if all(past.header.placement_id != placement_id for past, _ in self._past):
            self._past.append((frame, payload))

    def _spoilt(self, fate: Spoiling, frame: Frame, payload: bytes) -> Forwarded | None:
        """None if this fault does not apply to the frame."""
        header = frame.header
        match fate:
            case "flip":
                return [(frame, payload[:-1] + bytes([payload[-1] ^ 0x10]))]
            case "label":
                cached = header.num_cached_tokens + 16
                return [(_relabelled(frame, num_cached_tokens=cached), payload)]
            case "shorten":
                return _shortened(frame, payload)
            case "cut" | "noise":
                self._spoiler.done[fate] += 1
                raise Broken(fate == "noise")
            case "twice":
                return [(frame, payload), (self._forged(frame), payload)]
            case "late":  # the very first frame, whose placement has ended
                past, past_payload = self._past[0]
                return [(self._forged(past), past_payload), (frame, payload)]
            case "foreign":
                return self._foreign(frame, payload)
        return None

    def _foreign(self, frame: Frame, payload: bytes) -> Forwarded | None:
        """Relabels the frame with the most recent other placement."""
        for past, _ in reversed(self._past):
            other = past.header.placement_id
            if other != frame.header.placement_id:
                return [(_relabelled(frame, placement_id=other), payload)]
        return None

    def _forged(self, frame: Frame) -> Frame:
        """The frame with an id that no sender waits for."""
        self._num_forged += 1
        frame_id = FIRST_FORGED_ID + self._num_forged
        slot_index = None if frame.slot_index is None else FORGED_SLOT
        return msgspec.structs.replace(frame, frame_id=frame_id, slot_index=slot_index)


def _relabelled(frame: Frame, **changed: object) -> Frame:
    header = msgspec.structs.replace(frame.header, **changed)
    return msgspec.structs.replace(frame, header=header)


def _shortened(frame: Frame, payload: bytes) -> Forwarded | None:
    """Half of the frame, declared as complete."""
    header = frame.header
    if header.num_tokens < 2:
        return None
    num_tokens = header.num_tokens // 2
    num_bytes = header.payload_bytes // header.num_tokens * num_tokens
    shortened = _relabelled(frame, num_tokens=num_tokens, payload_bytes=num_bytes)
    if frame.codec:
        num_bytes = len(payload) // 2
        shortened = msgspec.structs.replace(shortened, coded_bytes=num_bytes)
    return [(shortened, payload[:num_bytes])]

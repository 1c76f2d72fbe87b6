"""Token masks of a step, which the leader's process computes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shared.clock import Clock
from shared.engine.executors.group.channel import Channel
from shared.engine.executors.group.messages import Masks, MasksWanted
from shared.engine.step import TokenMask

Words = NDArray[np.int32]


class RemoteMasks:
    """`channel` is None at a rank that does not answer, on a host without the one that does."""

    def __init__(self, channel: Channel | None) -> None:
        self._channel = channel

    def of_step(self, step: int, count: int) -> list[RemoteMask]:
        """Returns the masks of a step. One thread waits for those of all steps."""
        masks = _StepMasks(self._channel, step)
        return [RemoteMask(masks, place) for place in range(count)]


class _StepMasks:
    """The masks of a step. All come with one reply: most are ready when one is needed."""

    def __init__(self, channel: Channel | None, step: int) -> None:
        self._channel, self._step = channel, step
        self._words: list[bytes | None] | None = None

    def wait(self, place: int, timeout_s: float) -> Words | None:
        if self._words is None or (self._words[place] is None and timeout_s > 0):
            assert self._channel is not None, "of the answering rank"
            self._channel.send(MasksWanted(self._step, timeout_s))
            reply: Masks = self._channel.receive(Masks)
            self._words = reply.words
        words = self._words[place]
        return None if words is None else np.frombuffer(words, np.int32)


class RemoteMask:
    """A `TokenMask`."""

    def __init__(self, masks: _StepMasks, place: int) -> None:
        self._masks = masks
        self._place = place

    def wait(self, timeout_s: float) -> Words | None:
        return self._masks.wait(self._place, timeout_s)


def mask_words(masks: Sequence[TokenMask], timeout_s: float, clock: Clock) -> list[bytes | None]:
    """Returns the words of all masks of a step, at the leader; None for those not ready within
    `timeout_s` together.
    """
    deadline = clock.now() + timeout_s
    words = [mask.wait(max(0.0, deadline - clock.now())) for mask in masks]
    return [None if each is None else each.tobytes() for each in words]

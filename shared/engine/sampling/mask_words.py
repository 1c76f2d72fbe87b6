"""Token masks of a step: waits for them with one deadline, and removes banned tokens from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shared.clock import Clock
from shared.engine.runner import TokenMasks

Words = NDArray[np.int32]  # [⌈vocab_size / 32⌉]: bit t % 32 of word t // 32 is set if t is allowed

MIN_WAIT_S = 1e-3
WAIT_SHARE = 0.1  # of the forward pass


@dataclass(frozen=True, slots=True)
class JoinedMasks:
    """The masks of a step that came in time, by row, and the rows whose masks did not."""

    words: dict[int, Words]
    late_rows: frozenset[int]


NO_MASKS = JoinedMasks({}, frozenset())


def join_masks(
    masks: TokenMasks | None, clock: Clock, forward_time_s: Callable[[], float]
) -> JoinedMasks:
    """Waits for all masks together at most 1 ms or a tenth of `forward_time_s()`, whichever is
    longer; one slow mask delays the other rows no more than that. `forward_time_s` is only called
    if a mask is not ready, and may wait for the device: masks are computed meanwhile.
    """
    if masks is None:
        return NO_MASKS
    words = [mask.wait(0.0) for mask in masks.masks]
    if any(each is None for each in words):
        deadline = max(MIN_WAIT_S, WAIT_SHARE * forward_time_s()) + clock.now()
        for index, mask in enumerate(masks.masks):
            if words[index] is None:
                words[index] = mask.wait(max(0.0, deadline - clock.now()))
    by_row = list(zip(masks.rows.tolist(), words, strict=True))
    return JoinedMasks(
        {row: each for row, each in by_row if each is not None},
        frozenset(row for row, each in by_row if each is None),
    )


def without_banned(
    words: Mapping[int, Words], banned: Iterable[tuple[int, int]]
) -> tuple[dict[int, Words], list[tuple[int, int]]]:
    """Returns the masks without the banned tokens of their rows, and the bans of other rows.

    A mask that would allow nothing stays as it is: a grammar that only allows the end ends.
    """
    token_ids: dict[int, list[int]] = {}
    others = []
    for row, token_id in banned:
        if row in words:
            token_ids.setdefault(row, []).append(token_id)
        else:
            others.append((row, token_id))
    return {**words, **{row: _clear(words[row], ids) for row, ids in token_ids.items()}}, others


def _clear(words: Words, token_ids: list[int]) -> Words:
    """A copy without these tokens, or `words` if none were left."""
    ids = np.array(token_ids)
    cleared = words.copy()
    bits = np.left_shift(1, ids & 31).astype(np.uint32)
    np.bitwise_and.at(cleared.view(np.uint32), ids >> 5, ~bits)
    return cleared if cleared.any() else words


def allowed_tokens(words: Words, vocab_size: int) -> NDArray[np.int64]:
    """[n] token ids in ascending order."""
    bits = np.unpackbits(words.view(np.uint8), count=vocab_size, bitorder="little")
    return np.flatnonzero(bits)

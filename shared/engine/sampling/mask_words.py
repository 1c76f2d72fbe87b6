"""Token masks of a step: waits for them with one deadline, and removes banned tokens from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shared.clock import Clock
from shared.engine.step import TokenMasks

Words = NDArray[np.int32]  # [⌈vocab_size / 32⌉]: bit t % 32 of word t // 32 is set if t is allowed

MIN_WAIT_S = 1e-3
WAIT_SHARE = 0.1  # share of the forward pass
MAX_FEW = 4096  # tokens of a row


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
    """Returns a copy without these tokens, or `words` if none were left."""
    ids = np.array(token_ids)
    cleared = words.copy()
    bits = np.left_shift(1, ids & 31).astype(np.uint32)
    np.bitwise_and.at(cleared.view(np.uint32), ids >> 5, ~bits)
    return cleared if cleared.any() else words


@dataclass(frozen=True, slots=True)
class FewTokens:
    """The tokens that each of M rows may sample, flat: those of row `rows[m]` begin at `starts[m]`,
    ascending.
    """

    rows: NDArray[np.int64]  # [M]
    starts: NDArray[np.int64]  # [M]
    token_ids: NDArray[np.int64]  # [K]
    row_of_token: NDArray[np.int64]  # [K], of `rows`


def few_tokens(words: Mapping[int, Words], vocab_size: int) -> FewTokens | None:
    """Returns the tokens of the rows whose masks allow at most MAX_FEW, or None without
    such rows.
    """
    if not words:
        return None
    rows, masks = np.array(list(words)), np.concatenate(list(words.values()))
    masks = masks.reshape(len(rows), -1)
    width = masks.shape[1] * 32
    if masks.shape[1] > MAX_FEW:
        is_candidate = np.count_nonzero(masks, axis=1) <= MAX_FEW
        rows, masks = rows[is_candidate], masks[is_candidate]
    word = np.flatnonzero(masks)
    bit = np.flatnonzero(np.unpackbits(masks.ravel()[word].view(np.uint8), bitorder="little"))
    place = word[bit >> 5] * 32 + (bit & 31)  # place in the rows, one after the other
    starts = np.searchsorted(place, np.arange(len(rows)) * width)
    counts = np.diff(starts, append=len(place))
    index = np.repeat(np.arange(len(rows)), counts)
    token_ids = place - index * width
    is_few = (counts > 0) & (counts <= MAX_FEW)
    is_few[index[token_ids >= vocab_size]] = False
    if not is_few.any():
        return None
    if not is_few.all():
        is_used = is_few[index]
        rows, counts, token_ids = rows[is_few], counts[is_few], token_ids[is_used]
        index, starts = np.repeat(np.arange(len(rows)), counts), np.cumsum(counts) - counts
    return FewTokens(rows, starts, token_ids, rows[index])


def allowed_tokens(words: Words, vocab_size: int) -> NDArray[np.int64]:
    """[n] token ids in ascending order."""
    bits = np.unpackbits(words.view(np.uint8), count=vocab_size, bitorder="little")
    return np.flatnonzero(bits)

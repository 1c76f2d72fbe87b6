"""What another site may cost this one. No I/O."""

from __future__ import annotations

FREE_PLACES = 4  # a site may have as many places for each that is free


def has_place(num_own: int, num_all: int, most: int) -> bool:
    """Returns whether a site with `num_own` of `num_all` places may have one more of `most`, which
    all sites share: alone it gets four fifths, and the next one finds some. (Choudhury and Hahne,
    dynamic queue length thresholds.)
    """
    return num_own < FREE_PLACES * (most - num_all)


class Allowance:
    """So many at once, and as many again in `refill_s` seconds."""

    def __init__(self, most: float, refill_s: float, now: float) -> None:
        self._most, self._per_s = most, most / refill_s
        self._left, self._at = most, now

    def takes(self, cost: float, now: float) -> bool:
        """Returns whether it is granted."""
        earned = (now - self._at) * self._per_s
        self._left, self._at = min(self._left + earned, self._most), now
        if cost > self._left:
            return False
        self._left -= cost
        return True

"""What one other site is still to be sent of the prefixes that this one holds for it. No I/O.

    a fingerprint held, or no longer held ──changed──▶ sent ┐ when there are bytes for it
    all held: every SNAPSHOT_S, or when the site is heard again ──▶ sent ┘ after what has changed
    some withdrawn ──▶ a gap in the numbers, then all that are left: a receiver forgets before

A message says what holds now, so a change that is undone before it was sent costs 4 bytes at most,
and a receiver that has missed nothing takes a snapshot in like changes. None names what was
withdrawn.

A site pays for its digests with the prompts that it sends: these earn a share of their bytes.
Besides there are BYTES_PER_S for snapshots, and for evictions while nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from math import inf
from typing import NamedTuple

from shared.lifecycle.health import SITE_INTERVAL_S
from shared.messages import FINGERPRINT_BYTES, MAX_DIGEST_FINGERPRINTS

BYTES_PER_S = 33  # 10 kB/s from 300 sites
PROMPT_SHARE = 1 / 32  # 250 bytes for a prompt of 2000 tokens, which has 15 fingerprints
MAX_BYTES = 65_536  # saved
FIRST_BYTES = 4096
MESSAGE_BYTES = 240  # of a message besides its fingerprints: subject, names, number
CLASS_BYTES = 20  # more for a region class, besides its name in subject and message
FEW = 64  # fingerprints: fewer are sent only if there are no more
SNAPSHOT_S = 60.0  # after the last one is sent
SILENT_S = 4 * SITE_INTERVAL_S


class DigestPart(NamedTuple):
    """The next message: its number, whether a snapshot begins, and the fingerprints."""

    sequence_number: int
    is_first: bool
    added: list[int]
    removed: list[int]


class SiteDigest:
    def __init__(self, region_class: str = "") -> None:
        of_class = CLASS_BYTES + 2 * len(region_class) if region_class else 0
        self._message_bytes = MESSAGE_BYTES + of_class
        self._num_holders: dict[int, int] = {}  # prefixes with this fingerprint
        self._changed: dict[int, None] = {}
        self._unchanged: dict[int, None] = {}  # the rest of the snapshot
        self._number = 0
        self._is_first = True
        self._is_withdrawn = False  # the next message is sent even if it names nothing
        self._snapshot_at = -inf
        self._heard_at = -inf
        self._bytes = float(FIRST_BYTES)
        self._filled_at: float | None = None

    def __len__(self) -> int:
        """Returns the number of fingerprints that are held."""
        return len(self._num_holders)

    def heard(self, now: float) -> None:
        """Takes in a sign of life of the other site. After a silence it gets a snapshot."""
        if now - self._heard_at > SILENT_S:
            self.begin_snapshot(now)
        self._heard_at = now

    def earn(self, num_prompt_bytes: int) -> None:
        self._bytes = min(self._bytes + num_prompt_bytes * PROMPT_SHARE, MAX_BYTES)

    def hold(self, fingerprints: Iterable[int]) -> None:
        for each in fingerprints:
            number = self._num_holders.get(each, 0)
            self._num_holders[each] = number + 1
            if not number:
                self._changed[each] = None

    def release(self, fingerprints: Iterable[int]) -> None:
        for each in fingerprints:
            number = self._num_holders[each]
            if number > 1:
                self._num_holders[each] = number - 1
            else:
                del self._num_holders[each]
                self._unchanged.pop(each, None)
                self._changed[each] = None

    def withdraw(self, fingerprints: Iterable[int]) -> None:
        """Has the other site forget fingerprints that are held, and names none of them, nor any
        that has been released since the last message.
        """
        left, num_before = self._num_holders, len(self._num_holders)
        for each in fingerprints:
            left[each] -= 1
            if not left[each]:
                del left[each]
        if len(left) < num_before or any(each not in left for each in self._changed):
            self._number += 1
            self._is_first = self._is_withdrawn = True
            self._changed, self._unchanged = {}, dict.fromkeys(left)

    def take(self, now: float, *, num_shares: int) -> DigestPart | None:
        """Returns the next message, or None: there is nothing to send, the other site is silent, or
        the bytes do not suffice. The gateways of this site, and the region classes, share
        BYTES_PER_S.
        """
        if now - self._heard_at > SILENT_S:
            return None
        self._fill(BYTES_PER_S / max(1, num_shares), now)
        if self._unchanged:
            self._snapshot_at = now
        elif now - self._snapshot_at >= SNAPSHOT_S:
            self.begin_snapshot(now)
        num_pending = len(self._changed) + len(self._unchanged)
        wanted = min(num_pending, FEW)
        if not (wanted or self._is_withdrawn):
            return None
        if self._bytes < self._message_bytes + wanted * FINGERPRINT_BYTES:
            return None
        return self._part()

    def begin_snapshot(self, now: float) -> None:
        """Sends everything again: a receiver may have missed something."""
        self._is_first, self._snapshot_at, changed = True, now, self._changed
        self._unchanged = {each: None for each in self._num_holders if each not in changed}

    def _fill(self, per_s: float, now: float) -> None:
        if self._filled_at is not None:
            self._bytes = min(self._bytes + per_s * (now - self._filled_at), MAX_BYTES)
        self._filled_at = now

    def _part(self) -> DigestPart:
        room = int(self._bytes - self._message_bytes) // FINGERPRINT_BYTES
        taken = self._taken(min(room, MAX_DIGEST_FINGERPRINTS))
        added = [each for each in taken if each in self._num_holders]
        removed = [each for each in taken if each not in self._num_holders]
        self._bytes -= self._message_bytes + FINGERPRINT_BYTES * len(taken)
        self._number += 1
        part = DigestPart(self._number, self._is_first, added, removed)
        self._is_first = self._is_withdrawn = False
        return part

    def _taken(self, most: int) -> list[int]:
        """Removes and returns what is to be sent next."""
        changed = list(islice(self._changed, most))
        unchanged = list(islice(self._unchanged, most - len(changed)))
        for each in changed:
            del self._changed[each]
        for each in unchanged:
            del self._unchanged[each]
        return changed + unchanged

"""Selects the model card that a gateway shows and prepares requests for. No I/O.

Workers of one model may differ in revision, block size and context. A request is for one revision
and one block size, its version: the gateway serves the version with most live decode workers, so
that a rollout changes the card once. Other sites count only without a live worker here: one with
another version must not take the requests of those here. The context is the largest of that
version, and is held for a while, so that a worker that restarts does not change the limit twice.
Workers of one version may also differ in their features: the card has those of any live one, as the
scheduler finds a worker.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain
from math import inf

import msgspec

from shared.messages import ModelCard
from shared.subjects import is_at_site

HOLD_S = 60.0  # seconds after the loss of the last worker with a card

Version = tuple[str, int]  # revision, block size


class CardSelection:
    """Selects among the cards of one model's live decode workers. Times: seconds of a monotonic
    clock.
    """

    def __init__(self, hold_s: float = HOLD_S) -> None:
        """`hold_s`: seconds for which a card stays after its last worker has left."""
        self._hold_s = hold_s
        self._live: dict[str, ModelCard] = {}  # by worker
        self._left: dict[ModelCard, float] = {}  # when its last worker left
        self._known: dict[Version, None] = {}  # the longest known first
        self._selected: ModelCard | None = None
        self._expires_at = -inf  # the time at which `_selected` expires

    def put(self, worker_id: str, card: ModelCard, now: float) -> None:
        """Adds a live worker that serves `card`."""
        if self._live.get(worker_id) == card:
            return
        self.remove(worker_id, now)
        self._live[worker_id] = card
        self._left.pop(card, None)
        self._known.setdefault(version_of(card))
        self._expires_at = -inf

    def remove(self, worker_id: str, now: float) -> None:
        """Does nothing for an unknown worker."""
        card = self._live.pop(worker_id, None)
        if card is None:
            return
        if card not in self._live.values():
            self._left[card] = now
        self._expires_at = -inf

    def card(self, now: float) -> ModelCard | None:
        """Returns None if no worker has been live for `hold_s`."""
        if now >= self._expires_at:
            self._select(now)
        return self._selected

    def _select(self, now: float) -> None:
        self._left = {card: at for card, at in self._left.items() if now < at + self._hold_s}
        cards = [*self._live.values(), *self._left]
        versions = {version_of(card) for card in cards}
        self._known = {each: None for each in self._known if each in versions}
        version = self._version()
        of_version = [card for card in cards if version_of(card) == version]
        selected = max(of_version, key=lambda each: each.max_context_tokens, default=None)
        if selected is not None:
            selected = msgspec.structs.replace(selected, features=self._features(version))
        self._selected = selected
        self._expires_at = min(self._left.values(), default=inf) + self._hold_s

    def _features(self, version: Version | None) -> tuple[str, ...]:
        live = (card.features for card in self._live.values() if version_of(card) == version)
        return tuple(sorted(set(chain.from_iterable(live))))

    def _version(self) -> Version | None:
        """Returns the version with the most live workers, those of this site first: of several the
        one known longest, or the current version if no worker is live.
        """
        here = [card for worker_id, card in self._live.items() if not is_at_site(worker_id)]
        num_live = Counter(map(version_of, here or self._live.values()))
        if num_live:
            return max(self._known, key=lambda each: num_live[each])
        if self._selected is not None and version_of(self._selected) in self._known:
            return version_of(self._selected)
        return next(iter(self._known), None)


def version_of(card: ModelCard) -> Version:
    return card.revision, card.block_size

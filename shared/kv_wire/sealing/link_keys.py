"""Decode's keys of its KV links: one for each prefill worker, generated on first use.

A prefill worker receives its key in `RunPrefill` and names it in the Hello of a connection. The key
is bound to the worker's region, which the bus binds to its credential: only in that region does the
holder of the key connect.
"""

from __future__ import annotations

from collections import OrderedDict

from shared.messages import LINK_KEY_BYTES, LINK_KEY_ID_BYTES, LinkKey, LinkSecurity
from shared.randomness import Randomness

MAX_KEYS = 4096  # the key that was handed out longest ago is dropped first


class LinkKeys:
    def __init__(self, security: LinkSecurity, randomness: Randomness) -> None:
        self.security = security
        self.randomness = randomness
        self._of_worker: OrderedDict[str, LinkKey] = OrderedDict()
        self._by_id: dict[bytes, LinkKey] = {}
        self._regions: dict[bytes, str | None] = {}  # by key id

    def key_for(self, prefill_worker_id: str, region: str | None = None) -> LinkKey:
        """Returns the same key until it is forgotten, or the worker is in another region."""
        link_key = self._of_worker.get(prefill_worker_id)
        if link_key is None or self._regions[link_key.key_id] != region:
            self.forget(prefill_worker_id)
            link_key = self._new_key(prefill_worker_id, region)
        self._of_worker.move_to_end(prefill_worker_id)
        return link_key

    def adopt(self, prefill_worker_id: str, link_key: LinkKey, region: str | None = None) -> None:
        """Accepts a key that the leader of this process has generated."""
        if self._of_worker.get(prefill_worker_id) != link_key:
            self.forget(prefill_worker_id)
            self._add(prefill_worker_id, link_key, region)
        self._of_worker.move_to_end(prefill_worker_id)

    def region_of(self, key_id: bytes) -> str | None:
        """Returns the region of the worker that has the key; None: it is not known."""
        return self._regions.get(key_id)

    def find(self, key_id: bytes) -> LinkKey | None:
        return self._by_id.get(key_id)

    def forget(self, prefill_worker_id: str) -> None:
        """Forgets the key of a worker. Idempotent. Open connections continue; a new one
        needs a new key.
        """
        link_key = self._of_worker.pop(prefill_worker_id, None)
        if link_key is not None:
            del self._by_id[link_key.key_id], self._regions[link_key.key_id]

    def _new_key(self, prefill_worker_id: str, region: str | None) -> LinkKey:
        link_key = LinkKey(
            key_id=self.randomness.bytes(LINK_KEY_ID_BYTES),
            key=self.randomness.bytes(LINK_KEY_BYTES),
            security=self.security,
        )
        self._add(prefill_worker_id, link_key, region)
        return link_key

    def _add(self, prefill_worker_id: str, link_key: LinkKey, region: str | None) -> None:
        if len(self._of_worker) >= MAX_KEYS:
            self.forget(next(iter(self._of_worker)))
        self._of_worker[prefill_worker_id] = self._by_id[link_key.key_id] = link_key
        self._regions[link_key.key_id] = region

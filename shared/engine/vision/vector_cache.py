"""Encoded images in the host's memory, by tenant root and image hash. The least recently used ones
leave first.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple


class ImageKey(NamedTuple):
    """A tenant, the root of its hash chains, and the image: no tenant finds another's vectors."""

    tenant_id: str
    cache_root: bytes
    image_hash: bytes


class VectorCache:
    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._vectors: OrderedDict[ImageKey, bytearray] = OrderedDict()
        self.num_bytes = 0

    def get(self, key: ImageKey) -> bytearray | None:
        found = self._vectors.get(key)
        if found is not None:
            self._vectors.move_to_end(key)
        return found

    def put(self, key: ImageKey, vectors: bytearray) -> None:
        """Adds an image that is not in the cache; one larger than the cache is left out."""
        if len(vectors) > self._max_bytes or key in self._vectors:
            return
        self._vectors[key] = vectors
        self.num_bytes += len(vectors)
        while self.num_bytes > self._max_bytes:
            _, removed = self._vectors.popitem(last=False)
            self.num_bytes -= len(removed)

    def drop(self, key: ImageKey) -> bytearray:
        """Forgets the vectors of an image, if it has them, and returns them."""
        found = self._vectors.pop(key, bytearray())
        self.num_bytes -= len(found)
        return found

    def drop_tenant(self, tenant_id: str) -> list[tuple[ImageKey, bytearray]]:
        """Forgets the vectors of a tenant's images, and returns them."""
        keys = [each for each in self._vectors if each.tenant_id == tenant_id]
        return [(key, self.drop(key)) for key in keys]

    def clear(self) -> None:
        self._vectors.clear()
        self.num_bytes = 0

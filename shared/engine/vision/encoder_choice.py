"""Chooses the worker that encodes an image: a pure function of the image and the live workers.

Every worker chooses the same one for the same image of a tenant, by highest random weight hashing,
so that it is encoded once, and nobody has to record where. If the chosen one fails, the next one is
the same for all, too; and when workers come or go, only their own images move.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from hashlib import blake2b

from shared.engine.vision.vector_cache import ImageKey
from shared.messages import Heartbeat
from shared.numerics import Numerics


def encoder_key(revision: str, numerics: Numerics) -> str:
    """Returns what the bits of an image's vectors depend on, besides its pixels: in the fast mode
    the weights and the dtype alone, as with KV.
    """
    if numerics.mode == "exact":
        return "/".join((revision, numerics.device, numerics.dtype, numerics.kernels))
    return "/".join((revision, numerics.mode, numerics.dtype))


def encoders_of(
    image: ImageKey,
    key: str,
    workers: Iterable[Heartbeat],
    regions: Collection[str] | None,
    itself: str | None = None,
) -> list[str]:
    """Returns the ids of the workers whose encoder has this key and whose region is one of
    `regions` (None: any), the best one first. `itself` is the asking worker, if it is one of them.
    """
    found = {
        each.process_id
        for each in workers
        if each.encoder is not None
        and each.encoder.key == key
        and (regions is None or each.region in regions)
    }
    if found and itself is not None:
        found.add(itself)
    return sorted(found, key=lambda worker_id: _weight(image, worker_id), reverse=True)


def _weight(image: ImageKey, worker_id: str) -> bytes:
    of_image = image.cache_root + image.image_hash
    return blake2b(worker_id.encode(), key=of_image[:64], digest_size=8).digest()

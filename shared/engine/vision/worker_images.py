"""The images of a worker's requests: checks them, and gives them to their sequences."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from shared.engine.batching.sequence import Sequence
from shared.engine.model_config.vision_config import VisionConfig
from shared.engine.vision.image_jobs import ImageJobs, WantedImage
from shared.engine.vision.remote_vectors import RemoteVectors
from shared.engine.vision.sequence_images import SequenceImage, WantedImages
from shared.engine.vision.vector_cache import ImageKey
from shared.errors import InvalidRequest
from shared.messages import ImagePart, PinPrefix, Request, RunPrefill, WorkerLoad
from shared.packing import unpack_token_ids
from shared.pixels.pixel_fetcher import PixelFetcher, PixelRequest
from shared.pixels.pixel_frames import MAX_IMAGE_BYTES, image_bytes


class WorkerImages:
    def __init__(
        self,
        config: VisionConfig,
        jobs: ImageJobs,
        fetcher: PixelFetcher,
        vector_bytes: int,
        remote: RemoteVectors | None = None,
    ) -> None:
        """`remote` is what `jobs` fetches vectors with; None: it fetches none."""
        self._config = config
        self._remote = remote
        self._jobs = jobs
        self._fetcher = fetcher
        self._vector_bytes = vector_bytes

    def counted(self, load: WorkerLoad) -> WorkerLoad:
        return self._jobs.counts.add_to(load)

    def attach(
        self,
        message: Request | RunPrefill | PinPrefix,
        packed_ids: bytes,
        sequences: Iterable[Sequence],
    ) -> tuple[WantedImages, ...]:
        """Gives a request's images to its sequences. The caller closes what is returned. Raises
        InvalidRequest if the images are not those of the tokens.
        """
        _check_order(message.images)
        token_ids = np.array(unpack_token_ids(packed_ids), dtype=np.int64)
        placed = [
            (part, positions)
            for number, part in enumerate(message.images)
            if len(positions := self._positions(number, part, token_ids))
        ]
        found = []
        for sequence in sequences if placed else ():
            own = [SequenceImage(at, self._wanted(message, part)) for part, at in placed]
            sequence.images = wanted = WantedImages(own, self._jobs, self._vector_bytes)
            found.append(wanted)
        return tuple(found)

    def drop_tenant(self, tenant_id: str) -> None:
        self._jobs.drop_tenant(tenant_id)

    def clear_cache(self) -> None:
        self._jobs.clear_cache()

    async def start(self) -> None:
        if self._remote is not None:
            await self._remote.start()

    async def close(self) -> None:
        await self._jobs.close()
        if self._remote is not None:
            await self._remote.stop()
        await self._fetcher.close()

    def _positions(
        self, number: int, part: ImagePart, token_ids: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Returns the positions of a part's image tokens; a prefill may not have all of them."""
        end = part.first_token + part.num_tokens
        here = token_ids[part.first_token : end]
        found = part.first_token + np.flatnonzero(here == self._config.image_token_id)
        expected = self._config.num_tokens(part.grid)
        is_complete = end <= len(token_ids)
        if len(found) > expected or (is_complete and len(found) < expected):
            raise InvalidRequest(
                f"image {number + 1} has {len(found)} tokens in the prompt, its grid of "
                f"{part.grid[0]} x {part.grid[1]} has {expected}",
                param="images",
            )
        return found

    def _wanted(self, message: Request | RunPrefill | PinPrefix, part: ImagePart) -> WantedImage:
        """Raises InvalidRequest for an image that is larger than any gateway sends."""
        shape = self._config.pixel_shape(part.grid)
        if image_bytes(shape) > MAX_IMAGE_BYTES:
            raise InvalidRequest(
                f"an image of the shape {shape} has more bytes than {MAX_IMAGE_BYTES}",
                param="images",
            )
        pixels = PixelRequest(
            gateway_id=message.gateway_id,
            tenant_id=message.tenant_id,
            request_id=message.request_id,
            image_hash=part.image_hash,
            shape=shape,
            region_class=message.region_class,
            allowed_regions=message.allowed_regions,
        )
        key = ImageKey(message.tenant_id, message.cache_root, part.image_hash)
        is_retained = isinstance(message, PinPrefix) or not message.is_zero_retention
        return WantedImage(key, pixels, is_retained=is_retained, grid=part.grid)


def _check_order(parts: Iterable[ImagePart]) -> None:
    """Raises InvalidRequest unless the parts follow one another."""
    end = 0
    for part in parts:
        if part.first_token < end:
            raise InvalidRequest("the images of a prompt overlap", param="images")
        end = part.first_token + part.num_tokens

"""A worker whose images are encoded, without a gateway and its data plane."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shared.block_hash import root_hash
from shared.engine.batching.sequence import Sequence
from shared.engine.vision.image_encoder import ThreadedEncoder
from shared.engine.vision.image_jobs import ImageJobs
from shared.engine.vision.load_encoder import LoadedEncoder
from shared.engine.vision.vector_cache import VectorCache
from shared.engine.vision.worker_images import WorkerImages
from shared.errors import DependencyUnavailable
from shared.messages import Choice, ImageParts, Request, SamplingParams
from shared.packing import pack_token_ids
from shared.pixels.pixel_fetcher import PixelRequest
from tests.support.engine.model_worker import Worker
from tests.support.engine.vision.vision_models import Picture

NUM_NEW = 6


class Pixels:
    """The pixels that gateways hold."""

    def __init__(self, *pictures: Picture) -> None:
        self.by_hash = {each.image_hash: each.pixels for each in pictures}
        self.failing: set[str] = set()  # requests that have ended
        self.fetched: list[NDArray[np.uint8]] = []
        self.num_fetches = 0

    async def fetch(self, request: PixelRequest, deadline_s: float) -> memoryview:
        self.num_fetches += 1
        if request.request_id in self.failing:
            raise DependencyUnavailable("the gateway is gone")
        self.fetched.append(self.by_hash[request.image_hash].copy())
        return self.fetched[-1].reshape(-1).data


class VisionWorker(Worker):
    """A worker whose images are encoded on a thread."""

    def __init__(
        self,
        folder: Path,
        encoder: LoadedEncoder,
        pixels: Pixels,
        *,
        cache_bytes=1 << 20,
        **options,
    ) -> None:
        super().__init__(folder, "float32", **options)
        self.fetched = pixels
        self.jobs = ImageJobs(
            ThreadedEncoder(encoder),
            pixels.fetch,
            VectorCache(cache_bytes),
            lambda: 0.0,
            lambda: None,
        )
        self.images = WorkerImages(encoder.config, self.jobs, None, encoder.vector_bytes)

    def sequence(self, name: bytes, token_ids, images: ImageParts, **options) -> Sequence:
        request = request_of(name.decode(), token_ids, images, options.pop("tenant", "a"))
        options.setdefault("sampling", request.sampling)
        sequence = Sequence(
            sequence_id=name,
            tenant_id=request.tenant_id,
            cache_root=request.cache_root,
            token_ids=list(token_ids),
            num_prompt_tokens=len(token_ids),
            image_parts=images,
            **options,
        )
        self.images.attach(request, request.prompt_token_ids, (sequence,))
        return sequence

    async def run_on(self) -> None:
        while await self.turn():
            if not self.in_flight:
                await asyncio.sleep(0)  # an image may have become ready


def request_of(name: str, token_ids, images: ImageParts, tenant: str = "a") -> Request:
    return Request(
        request_id=name,
        tenant_id=tenant,
        gateway_id="gateway-1",
        model="m",
        revision="r",
        cache_root=root_hash(tenant, "r"),
        prompt_token_ids=pack_token_ids(token_ids),
        block_hashes=b"",
        sampling=SamplingParams(
            seed=0, max_tokens=NUM_NEW, temperature=0.0, num_prompt_logprobs=None
        ),
        choices=(Choice(choice_index=0),),
        deadline_s=60.0,
        images=images,
    )

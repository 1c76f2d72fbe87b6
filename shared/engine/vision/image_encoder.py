"""The seam between a worker and whatever encodes its images, and an encoder on a thread.

The thread has a lower priority than the thread of steps: where cores are short, steps get six of
seven parts of them. Without steps it has all cores.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shared.background import item_error
from shared.engine.model_config.vision_config import VisionConfig
from shared.errors import DeviceFailed, HearthError, OutOfMemory, StepFailed
from shared.lifecycle.child_process import lower_priority

NICENESS = 7  # has a sixth of the weight of a thread of steps
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


class ImageEncoder(Protocol):
    config: VisionConfig
    vector_bytes: int  # of one token

    async def encode(self, tile: NDArray[np.uint8]) -> bytes:
        """tile [3, H, W] -> the vectors of its tokens, [tokens_per_tile, output_size] in the dtype
        of the model. One call at a time. Raises OutOfMemory or StepFailed, of this tile alone, and
        DeviceFailed once the device computes no more tiles.
        """
        ...

    async def close(self) -> None: ...


class TileEncoder(Protocol):
    """What the thread calls: a tile's vectors, computed on the calling thread."""

    config: VisionConfig
    vector_bytes: int

    def init_thread(self) -> None:
        """Called first on the thread that encodes."""
        ...

    def encode_tile(self, tile: NDArray[np.uint8]) -> bytes: ...

    def check(self) -> None:
        """Raises if the device is lost: an error of a kernel stays with the process."""
        ...


class ThreadedEncoder:
    """An `ImageEncoder` on a thread of its own."""

    def __init__(self, encoder: TileEncoder) -> None:
        self.config = encoder.config
        self.vector_bytes = encoder.vector_bytes
        self._encoder = encoder
        self._thread = ThreadPoolExecutor(1, "image-encoder", initializer=self._init_thread)

    async def encode(self, tile: NDArray[np.uint8]) -> bytes:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, self._encoder.encode_tile, tile)
        except BaseException as raised:
            error = _error_of(item_error(raised))
            if isinstance(error, StepFailed):
                await self._check()
            raise error from raised

    async def _check(self) -> None:
        """Raises DeviceFailed if the device is lost."""
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._encoder.check)
        except BaseException as raised:
            reason = str(item_error(raised)).partition("\n")[0]
            raise DeviceFailed(f"the device of the image encoder is lost: {reason}") from raised

    def _init_thread(self) -> None:
        lower_priority(threading.get_native_id(), NICENESS)
        self._encoder.init_thread()

    async def close(self) -> None:
        """Waits for the tile that is being encoded."""
        await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)


def _error_of(error: Exception) -> HearthError:
    if isinstance(error, HearthError):
        return error
    text = str(error).partition("\n")[0]
    if isinstance(error, MemoryError) or any(each in str(error) for each in _OUT_OF_MEMORY):
        return OutOfMemory(f"no memory to encode an image: {text}")
    return StepFailed(f"an image could not be encoded: {type(error).__name__}: {text}")

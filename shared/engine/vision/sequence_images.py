"""The images of one sequence: which of its tokens can be computed, and with which vectors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shared.engine.batching.sequence import ImageVectors
from shared.engine.vision.image_jobs import ImageJobs, WantedImage
from shared.errors import HearthError


class SequenceImage:
    """One image: the positions of its tokens in the prompt, in the order of their vectors, and its
    claim while a sequence needs it.
    """

    def __init__(self, positions: NDArray[np.int64], wanted: WantedImage) -> None:
        self.positions = positions
        self.first, self.end = int(positions[0]), int(positions[-1]) + 1
        self.wanted = wanted
        self.is_wanted = False

    @property
    def is_ready(self) -> bool:
        return self.wanted.vectors is not None

    def places(self, start: int, end: int) -> slice:
        """Returns the places in `positions` of the tokens in [start, end)."""
        first, last = np.searchsorted(self.positions, (start, end))
        return slice(int(first), int(last))


class WantedImages:
    """A `SequenceImages`. An image is wanted when its sequence is about to compute its tokens, one
    image ahead, and dropped once they are computed.
    """

    def __init__(self, images: Sequence[SequenceImage], jobs: ImageJobs, vector_bytes: int) -> None:
        """`images` are in the order of the prompt."""
        self._images = images
        self._jobs = jobs
        self._vector_bytes = vector_bytes
        self._end = images[-1].end
        self._is_closed = False

    @property
    def error(self) -> HearthError | None:
        return next((each.wanted.error for each in self._images if each.wanted.error), None)

    def num_ready(self, num_computed: int, start: int, count: int) -> int:
        if start >= self._end:
            if num_computed >= self._end:
                self._drop_before(num_computed)
            return count
        self._drop_before(num_computed)
        end = start + count
        num_ahead = 0
        for image in self._images:
            if image.end <= start:
                continue
            if image.first >= end and num_ahead:
                break
            num_ahead += image.first >= end
            self._want(image)
            if not image.is_ready:
                places = image.places(start, end)
                if places.start < places.stop:
                    end = min(end, int(image.positions[places.start]))
        return end - start

    def vectors(self, start: int, count: int) -> ImageVectors | None:
        """Raises HearthError for tokens whose image is not ready."""
        offsets: list[NDArray[np.int64]] = []
        parts: list[bytes] = []
        size = self._vector_bytes
        for image in self._images:
            if image.end <= start or image.first >= start + count:
                continue
            places = image.places(start, start + count)
            if places.start == places.stop:
                continue
            vectors = image.wanted.vectors
            if vectors is None:
                raise HearthError("a step needs an image that is not encoded")
            offsets.append(image.positions[places] - start)
            parts.append(bytes(memoryview(vectors)[places.start * size : places.stop * size]))
        return ImageVectors(np.concatenate(offsets), b"".join(parts)) if parts else None

    def close(self) -> None:
        """Drops all claims, at the end of the sequence. Idempotent."""
        self._is_closed = True
        for image in self._images:
            self._drop(image)

    def _want(self, image: SequenceImage) -> None:
        if not image.is_wanted and not self._is_closed and image.wanted.error is None:
            image.is_wanted = True
            self._jobs.want(image.wanted)

    def _drop_before(self, num_computed: int) -> None:
        for image in self._images:
            if image.is_wanted and image.end <= num_computed:
                self._drop(image)

    def _drop(self, image: SequenceImage) -> None:
        if image.is_wanted:
            image.is_wanted = False
            self._jobs.drop(image.wanted)

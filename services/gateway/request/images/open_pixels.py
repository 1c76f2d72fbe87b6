"""The pixels of open requests, which workers fetch from this gateway over the data plane.

prepared ──hold──▶ held ──the request ended──▶ forgotten; zeroed for tenants without retention
"""

from __future__ import annotations

from collections.abc import Sequence

from services.gateway.request.prompt import PackedPrompt
from services.gateway.request.request_builder import PreparedRequest
from shared.errors import HearthError
from shared.pixels.pixel_holder import PixelHolder


class OpenPixels:
    def __init__(self, holder: PixelHolder) -> None:
        self._holder = holder

    def hold(self, prepared: Sequence[PreparedRequest]) -> None:
        """Holds the images of all requests, or of none. Raises Overloaded and InvalidRequest."""
        try:
            for each in prepared:
                self._hold(each)
        except HearthError:
            for each in prepared:
                self.forget(each.request.request_id)
            raise

    def forget(self, request_id: str) -> None:
        """Releases the images of a request that has ended. Idempotent."""
        self._holder.forget(request_id)

    def _hold(self, prepared: PreparedRequest) -> None:
        request, prompt = prepared.request, prepared.generation.prompt
        if not request.images:
            return
        assert isinstance(prompt, PackedPrompt), "it is tokenized before"
        config = prepared.model.text.files.images
        assert config is not None, "checked before"
        regions = frozenset(request.allowed_regions) or None
        for image in prompt.images:
            if image.num_bytes:  # else the same image is in the prompt before
                shape = config.pixel_shape(image.part.grid)
                self._holder.put(
                    request.request_id,
                    request.tenant_id,
                    image.part.image_hash,
                    image.pixels,
                    shape,
                    regions=regions,
                    is_zeroed_at_end=request.is_zero_retention,
                )

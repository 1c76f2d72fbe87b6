"""Reads the images of named prefixes for workers, which compute a prefix without a request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from services.gateway.images.input_image import InputImage
from services.gateway.models.served_models import ServedModels
from services.gateway.models.served_text import ServedModel
from services.gateway.request.preparer import Preparer
from services.gateway.request.prompt import ChatPrompt
from shared.errors import InvalidRequest
from shared.messages import FetchPixels
from shared.pixels.pixel_holder import StoredImage
from shared.regions.region_classes import RegionClasses
from shared.store import Store
from shared.tenancy.prefixes import pinned_prefix
from shared.tenancy.prefixes.pinned_prefix import PrefixImage, prefix_of_request
from shared.tenancy.residency import may_hold, regions_of
from shared.tenancy.tenant import TenantRecord

# The pixels of an image do not depend on the conversation that it is in.
_ALONE = ({"role": "user", "content": [{"type": "image"}]},)


class PrefixPixels:
    def __init__(
        self,
        store: Store,
        *,
        record_of: Callable[[str], Awaitable[TenantRecord | None]],
        models: ServedModels,
        preparer: Preparer,
        region: str,
        classes: RegionClasses,
    ) -> None:
        """`record_of`: returns a tenant's present record. `region`: that of this gateway."""
        self._store = store
        self._record_of = record_of
        self._models = models
        self._preparer = preparer
        self._region = region
        self._classes = classes

    async def find(self, command: FetchPixels) -> StoredImage | None:
        """Returns the image of a prefix; None if there is none, or if its tenant no longer allows
        it here. Raises HearthError.
        """
        name = prefix_of_request(command.request_id)
        record = None if name is None else await self._record_of(command.tenant_id)
        if name is None or record is None or record.is_zero_retention:
            return None
        if not may_hold(record, self._region, self._classes):
            return None
        prefix = await pinned_prefix.load(self._store, command.tenant_id, name)
        images = [] if prefix is None else prefix.images
        for image in images:
            if prefix is not None and image.part.image_hash == command.image_hash:
                model = await self._models.main(prefix.model)
                read = partial(self._read, command.tenant_id, model, image)
                return StoredImage(regions_of(record, self._classes), read)
        return None

    async def _read(self, tenant_id: str, model: ServedModel, image: PrefixImage) -> bytearray:
        """Raises InvalidRequest if the weights that are served now take another image."""
        given = InputImage("image", image.content, image.media_type, image.detail, is_decoded=True)
        prompt = ChatPrompt(_ALONE, images=(given,))
        (prepared,) = await self._preparer.prompts_with_images(model, tenant_id, [prompt])
        (found,) = prepared.images
        if found.part.image_hash != image.part.image_hash:
            raise InvalidRequest("the image of the prefix is of another revision of the model")
        return found.pixels

"""Has prompts with images prepared: the limits of their images, and the jobs for processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import msgspec

from services.gateway.body_budget import BodyBudget
from services.gateway.images.addresses.allowed_hosts import AllowedHosts
from services.gateway.images.addresses.image_fetcher import ImageFetcher
from services.gateway.images.input_image import ImageContext
from services.gateway.models.served_text import ServedModel, ServedText
from services.gateway.request.images.image_prompts import check_images
from services.gateway.request.prompt import ChatPrompt, Prompt
from services.gateway.text.process_jobs import ImageChatJob, TokenizedPrompt, encoded_values
from shared.config import GatewayConfig


def has_images(prompt: Prompt) -> bool:
    return isinstance(prompt, ChatPrompt) and bool(prompt.images)


class ImagePreparation:
    """`limits`: of images, without a model."""

    def __init__(self, limits: ImageContext, fetcher: ImageFetcher) -> None:
        self._limits = limits
        self._fetcher = fetcher

    @classmethod
    def of(cls, config: GatewayConfig, budget: BodyBudget) -> Self:
        """`budget`: of bodies, which the bytes of fetched images belong to."""
        return cls(
            ImageContext(
                max_images=config.max_images,
                max_pixels=config.max_image_pixels,
                max_text_bytes=config.max_body_bytes,
            ),
            ImageFetcher(AllowedHosts.of(config.image_host), budget),
        )

    def check(self, prompt: Prompt, text: ServedText) -> None:
        """Raises InvalidRequest for images that the model does not take, for too many, and for
        addresses that are not allowed.
        """
        if isinstance(prompt, ChatPrompt):
            check_images(prompt.images, text.files, self._limits.max_images)
            for each in prompt.images:
                if each.address:
                    self._fetcher.hosts.address_of(each)

    def of_body(self, model: ServedModel, max_text_bytes: int | None) -> ImageContext:
        """Returns what a process needs for the images of a large body. `max_text_bytes`: of the
        body without them, where it is not that of others.
        """
        context = self._of_model(model)
        if model.text.files.images is None:
            context = msgspec.structs.replace(context, max_images=0)
        if max_text_bytes is not None:
            context = msgspec.structs.replace(context, max_text_bytes=max_text_bytes)
        return context

    async def tokenized(
        self,
        prompts: Sequence[ChatPrompt],
        tenant_id: str,
        model: ServedModel,
        *,
        add_generation_prompt: bool = True,
        has_pixels: bool = True,
    ) -> list[TokenizedPrompt]:
        """Fetches what has an address, renders and tokenizes conversations with the same images,
        which are read once. Raises as `ImageFetcher` and `Renderer` do.
        """
        conversations = [
            encoded_values(each.messages, each.tools, add_generation_prompt, each.variables)
            for each in prompts
        ]
        first = prompts[0]
        counted = self._fetcher.bytes_of(tenant_id)
        try:
            job = ImageChatJob(
                conversations,
                [*await self._fetcher.fetched(first.images, counted)],
                self._of_model(model),
                max_context_tokens=model.card.max_context_tokens,
                has_pixels=has_pixels,
                param=first.param,
            )
            return await model.text.renderer.prepare_image_chat(job, tenant_id=tenant_id)
        finally:
            counted.release()

    def _of_model(self, model: ServedModel) -> ImageContext:
        return msgspec.structs.replace(self._limits, revision=model.card.revision)

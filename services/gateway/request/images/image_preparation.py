"""Has prompts with images prepared: the limits of their images, and the jobs for processes."""

from __future__ import annotations

from typing import Self

import msgspec

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

    def __init__(self, limits: ImageContext) -> None:
        self._limits = limits

    @classmethod
    def of(cls, config: GatewayConfig) -> Self:
        return cls(
            ImageContext(
                max_images=config.max_images,
                max_pixels=config.max_image_pixels,
                max_text_bytes=config.max_body_bytes,
            )
        )

    def check(self, prompt: Prompt, text: ServedText) -> None:
        """Raises InvalidRequest for images that the model does not take, and for too many."""
        if isinstance(prompt, ChatPrompt):
            check_images(prompt.images, text.files, self._limits.max_images)

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
        prompt: ChatPrompt,
        tenant_id: str,
        model: ServedModel,
        *,
        add_generation_prompt: bool = True,
        has_pixels: bool = True,
    ) -> TokenizedPrompt:
        """Renders and tokenizes a conversation with images. Raises as `Renderer` does."""
        values = (prompt.messages, prompt.tools, add_generation_prompt, prompt.variables)
        job = ImageChatJob(
            encoded_values(*values),
            [*prompt.images],
            self._of_model(model),
            max_context_tokens=model.card.max_context_tokens,
            has_pixels=has_pixels,
            param=prompt.param,
        )
        return await model.text.renderer.prepare_image_chat(job, tenant_id=tenant_id)

    def _of_model(self, model: ServedModel) -> ImageContext:
        return msgspec.structs.replace(self._limits, revision=model.card.revision)

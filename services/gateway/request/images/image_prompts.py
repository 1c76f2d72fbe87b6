"""Prompts with images, in a preparation process: what stands for an image in the rendered prompt is
replaced by the tokens of its pixels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from services.gateway.images.config import ImageConfig
from services.gateway.images.input_image import NO_IMAGES, ImageContext, InputImage, bad_image
from services.gateway.request.generation_request import prompt_too_long
from services.gateway.request.prompt import ChatPrompt
from services.gateway.text.chat_template import LiteralText
from services.gateway.text.model_files import ModelFiles, ModelText
from services.gateway.text.process_jobs import TokenizedImage
from shared.errors import InvalidRequest, PayloadTooLarge
from shared.messages import ImagePart

if TYPE_CHECKING:  # it loads numpy
    from services.gateway.images.processed import ProcessedImage

Tokenized = tuple[list[int], list[TokenizedImage]]


def check_images(images: Sequence[InputImage], files: ModelText, max_images: int) -> None:
    """Raises InvalidRequest for images that the model does not take, and for too many."""
    if images and files.images is None:
        raise bad_image(images[0].place, NO_IMAGES)
    if len(images) > max_images:
        place = images[max_images].place
        raise bad_image(place, f"{len(images)} images are more than the limit of {max_images}")


def check_text_bytes(body: bytes, images: Sequence[InputImage], context: ImageContext) -> None:
    """Raises PayloadTooLarge for a body that is too large without its images."""
    limit = context.max_text_bytes
    num_spaced = body.count(b", ") if images else 0
    num_bytes = len(body) - sum(each.num_sent_bytes(num_spaced) for each in images)
    if limit is not None and num_bytes > limit:
        beside = " without its images" if images else ""
        raise PayloadTooLarge(f"the request body is larger than {limit} bytes{beside}")


def tokenized_with_images(
    prompts: Sequence[ChatPrompt],
    files: ModelFiles,
    context: ImageContext,
    *,
    max_context_tokens: int | None,
    has_pixels: bool,
) -> list[Tokenized]:
    """Returns the tokens of rendered prompts that show the same images, and their images, each of
    which is decoded once. Raises InvalidRequest, also for a template that leaves an image out, and
    PromptTooLong.
    """
    # Pillow and numpy, which the gateway's own process does not load
    from services.gateway.images.processed import processed
    from services.gateway.images.processors import processor_of

    config = files.images
    assert config is not None, "checked before"
    processor, first = processor_of(config), prompts[0]
    for each in prompts:
        _check_places(each, processor.place)

    def check(num_tokens: int) -> None:
        if max_context_tokens is not None and num_tokens >= max_context_tokens:
            length = f"at least {num_tokens} tokens of images"
            raise prompt_too_long(first.param, length, max_context_tokens)

    found = [*processed(first.images, config, processor, context, check)]
    texts = [processor.placeholder(each.grid) for each in found]
    counts = [config.num_tokens(each.grid) for each in found]

    def tokenized(prompt: ChatPrompt) -> Tokenized:
        parts = _expanded(prompt.parts, iter(texts), processor.place)
        token_ids = files.tokenizer.encode([*parts])
        spans = _spans(token_ids, config, counts)
        return token_ids, _tokenized_images(found, spans, has_pixels=has_pixels)

    return [*map(tokenized, prompts)]


def _tokenized_images(
    found: Sequence[ProcessedImage], spans: Sequence[tuple[int, int]], *, has_pixels: bool
) -> list[TokenizedImage]:
    """Returns the images at their tokens: the pixels of equal ones with the first of them."""
    images, sent = [], set[bytes]()
    for each, (first, count) in zip(found, spans, strict=True):
        is_sent = has_pixels and each.image_hash not in sent
        sent.add(each.image_hash)
        part = ImagePart(
            first_token=first, num_tokens=count, image_hash=each.image_hash, grid=each.grid
        )
        pixels = each.pixels if is_sent else bytearray()
        images.append(TokenizedImage(part, len(pixels), pixels))
    return images


def _check_places(prompt: ChatPrompt, place_text: str) -> None:
    """Raises InvalidRequest unless the template writes one place for each image."""
    count = sum(each.count(place_text) for each in prompt.parts if not _is_literal(each))
    if count != len(prompt.images):
        place = prompt.images[min(count, len(prompt.images) - 1)].place
        raise bad_image(
            place, f"the chat template writes {count} places for {len(prompt.images)} images"
        )


def _expanded(parts: Sequence[str], texts: Iterator[str], place: str) -> Iterator[str]:
    """Yields the parts, with the next of `texts` in each place of an image."""
    for part in parts:
        if _is_literal(part) or place not in part:
            yield part
            continue
        first, *others = part.split(place)
        yield first + "".join(next(texts) + each for each in others)


def _is_literal(part: str) -> bool:
    return isinstance(part, LiteralText)


def _spans(
    token_ids: Sequence[int], config: ImageConfig, num_tokens: Sequence[int]
) -> list[tuple[int, int]]:
    """Returns the first token of each image, and the number of tokens to its last one. `num_tokens`
    are those of each image. Raises InvalidRequest for a tokenizer that has no token for images.
    """
    places = [n for n, each in enumerate(token_ids) if each == config.image_token_id]
    if len(places) != sum(num_tokens):
        raise InvalidRequest("this model's tokenizer has no token for images")
    spans, end = [], 0
    for count in num_tokens:
        begin, end = end, end + count
        spans.append((places[begin], places[end - 1] - places[begin] + 1))
    return spans

"""Decodes, renders and tokenizes in other processes: a large body, or the prompt of a request.

The reply is the same body with empty prompts, which the gateway decodes in no time, and the tokens
of the prompts that were in their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import msgspec

from services.gateway.models.served_text import ServedText
from services.gateway.request.endpoint import GeneratingEndpoint
from services.gateway.request.generation_request import (
    GenerationRequest,
    check_min_tokens,
    prompt_too_long,
)
from services.gateway.request.images.image_prompts import (
    Tokenized,
    check_images,
    check_text_bytes,
    tokenized_with_images,
)
from services.gateway.request.prompt import (
    ChatPrompt,
    Echo,
    PackedPrompt,
    Prompt,
    TextPrompt,
    check_tokens,
    encoded_echo,
    encoded_prompt,
    naming_field_of,
)
from services.gateway.text.chat_template import NO_TEMPLATE, ChatTemplate
from services.gateway.text.lone_surrogates import without_lone_surrogates
from services.gateway.text.model_files import ModelFiles
from services.gateway.text.process_jobs import (
    BodyJob,
    ImageChatJob,
    PreparedBody,
    TokenizedPrompt,
    template_values,
)
from services.gateway.text.tokenizer import bad_word_texts
from shared.errors import InvalidRequest
from shared.packing import pack_token_ids, unpack_token_ids

BadWords = tuple[tuple[int, ...], ...]

# Larger bodies are decoded, rendered and tokenized in another process. A thread would not do: the
# decoder holds the interpreter's lock.
MAX_INLINE_BYTES = 256 * 1024
MAX_INLINE_VALUES = 2048  # some 600 messages: 2 to 5 ms of the event loop
FEW_VALUES_BYTES = 8 * 1024  # bytes of a body whose values are not counted


def decodable(data: bytes) -> bytes:
    """Returns the body without lone surrogates. In a larger body, a preparation process replaces
    them.
    """
    return data if len(data) > MAX_INLINE_BYTES else without_lone_surrogates(data)


def is_small(data: bytes, num_stored_bytes: int = 0) -> bool:
    if len(data) + num_stored_bytes > MAX_INLINE_BYTES:
        return False
    return len(data) <= FEW_VALUES_BYTES or num_values(data) <= MAX_INLINE_VALUES


def num_values(data: bytes) -> int:
    """Estimates the number of values, never much too low, whatever spaces the body has: decoding
    and converting a value costs 1 µs, a text or a list of numbers of the same size a hundredth of
    that.
    """
    return data.count(b":") + data.count(b"{") + data.count(b"[") + data.count(b",") // 16


def prepare_body(
    job: BodyJob, endpoint: GeneratingEndpoint, files: ModelFiles, template: ChatTemplate | None
) -> PreparedBody:
    """Returns the body with empty prompts, and their tokens. Raises InvalidRequest and its
    subclasses, as the endpoint itself does.
    """
    body = endpoint.fields.decode(job.body)
    generations = endpoint.generations(body, "")
    if generations[0].model != (job.model or ""):
        raise InvalidRequest("`model` is given more than once", param="model")
    generations = endpoint.for_model(body, generations, files)
    _check_body(job, [each.prompt for each in generations], files)
    prompts = [_tokenized(each, job, files, template) for each in generations]
    short = endpoint.without_prompts(body, len(prompts))
    return PreparedBody(msgspec.json.encode(short), prompts)


def _check_body(job: BodyJob, prompts: Sequence[Prompt], files: ModelFiles) -> None:
    """Raises InvalidRequest for images that the model does not take, or for too many of them, and
    PayloadTooLarge for too much text beside them.
    """
    images = [n for each in prompts if isinstance(each, ChatPrompt) for n in each.images]
    check_images(images, files, job.images.max_images)
    check_text_bytes(job.body, images, job.images)


def with_prompts(
    generations: Sequence[GenerationRequest], prompts: Sequence[TokenizedPrompt]
) -> list[GenerationRequest]:
    """Replaces the empty prompts by the tokens that `prepare_body` returned."""
    pairs = zip(generations, prompts, strict=True)
    return [msgspec.structs.replace(each, prompt=packed_prompt(prompt)) for each, prompt in pairs]


def _tokenized(
    generation: GenerationRequest,
    job: BodyJob,
    files: ModelFiles,
    template: ChatTemplate | None,
) -> TokenizedPrompt:
    check_min_tokens(
        generation.prompt,
        files.longest_token_chars,
        max_context_tokens=job.max_context_tokens,
        max_input_tokens=job.max_input_tokens,
    )
    prompt = _rendered_prompt(generation.prompt, template)
    token_ids, images = _encoded(prompt, files, job)
    most = job.max_context_tokens
    if most is not None and len(token_ids) > most:
        raise prompt_too_long(prompt.param, f"{len(token_ids)} tokens", most)
    echo = encoded_echo(prompt, files) if generation.has_echo else None
    return TokenizedPrompt(
        prompt.param,
        pack_token_ids(token_ids),
        is_chat=isinstance(prompt, ChatPrompt),
        echo=None if echo is None else (echo.text, echo.offsets),
        num_calls=prompt.num_calls if isinstance(prompt, ChatPrompt) else 0,
        images=images,
    )


def _encoded(prompt: Prompt, files: ModelFiles, job: BodyJob) -> Tokenized:
    if not isinstance(prompt, ChatPrompt) or not prompt.images:
        return encoded_prompt(prompt, files), []
    return _with_images([prompt], files, job)[0]


def _with_images(
    prompts: Sequence[ChatPrompt], files: ModelFiles, job: BodyJob | ImageChatJob
) -> list[Tokenized]:
    return tokenized_with_images(
        prompts,
        files,
        job.images,
        max_context_tokens=job.max_context_tokens,
        has_pixels=job.has_pixels,
    )


def tokens_of_chat(
    prompt: ChatPrompt,
    job: BodyJob,
    files: ModelFiles,
    template: ChatTemplate | None,
    *,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Returns the tokens of a conversation in a large body. Raises InvalidRequest and its
    subclasses.
    """
    _check_body(job, [prompt], files)
    rendered = _rendered(prompt, template, add_generation_prompt=add_generation_prompt)
    return _encoded(rendered, files, job)[0]


def prepare_image_chat(
    job: ImageChatJob, files: ModelFiles, template: ChatTemplate | None
) -> PreparedBody:
    """Renders and tokenizes conversations with images. Returns their prompts, without a body.
    Raises InvalidRequest and its subclasses.
    """
    check_images(job.given, files, job.images.max_images)
    prompts = [_rendered_values(each, job, template) for each in job.conversations]
    found = [
        TokenizedPrompt(
            job.param,
            pack_token_ids(token_ids),
            is_chat=True,
            num_calls=prompt.num_calls,
            images=images,
        )
        for prompt, (token_ids, images) in zip(
            prompts, _with_images(prompts, files, job), strict=True
        )
    ]
    return PreparedBody(b"", found)


def _rendered_values(values: bytes, job: ImageChatJob, template: ChatTemplate | None) -> ChatPrompt:
    given = template_values(values)
    prompt = ChatPrompt(
        tuple(given.messages),
        tools=tuple(given.tools),
        variables=given.variables,
        images=tuple(job.given),
        param=job.param,
    )
    return _rendered(prompt, template, add_generation_prompt=given.add_generation_prompt)


def _rendered_prompt(prompt: Prompt, template: ChatTemplate | None) -> Prompt:
    return _rendered(prompt, template) if isinstance(prompt, ChatPrompt) else prompt


def _rendered(
    prompt: ChatPrompt, template: ChatTemplate | None, *, add_generation_prompt: bool = True
) -> ChatPrompt:
    if template is None:
        raise InvalidRequest(NO_TEMPLATE, param=prompt.param)
    with naming_field_of(prompt):
        parts = template.render(
            prompt.messages,
            prompt.tools,
            add_generation_prompt=add_generation_prompt,
            variables=prompt.variables,
        )
    return msgspec.structs.replace(prompt, parts=tuple(parts))


def packed_prompt(prompt: TokenizedPrompt) -> PackedPrompt:
    echo = None
    if prompt.echo is not None:
        text, offsets = prompt.echo
        echo = Echo(text, unpack_token_ids(prompt.token_ids), offsets)
    return PackedPrompt(
        prompt.token_ids,
        prompt.param,
        is_chat=prompt.is_chat,
        echo=echo,
        num_calls=prompt.num_calls,
        images=tuple(prompt.images),
    )


async def tokenized(
    generation: GenerationRequest, tenant_id: str, text: ServedText
) -> tuple[GenerationRequest, BadWords]:
    """Returns the rendered request with a prompt of tokens, and the tokens of its bad words. Raises
    the error that rejects the request.
    """
    prompt = generation.prompt
    if isinstance(prompt, ChatPrompt):
        prompt = await _packed_chat(prompt, tenant_id, text)
    elif isinstance(prompt, TextPrompt):
        prompt = await _packed_text(prompt, tenant_id, text, has_echo=generation.has_echo)
    bad_words = await _bad_words(generation.sampling.bad_words or (), tenant_id, text)
    return msgspec.structs.replace(generation, prompt=prompt), bad_words


async def _packed_chat(prompt: ChatPrompt, tenant_id: str, text: ServedText) -> PackedPrompt:
    found = await text.renderer.encode([prompt.parts], tenant_id=tenant_id)
    token_ids = pack_token_ids(found.token_ids[0])
    return PackedPrompt(token_ids, prompt.param, is_chat=True, num_calls=prompt.num_calls)


async def _packed_text(
    prompt: TextPrompt, tenant_id: str, text: ServedText, *, has_echo: bool
) -> PackedPrompt:
    found = await text.renderer.encode(
        [[prompt.text]],
        tenant_id=tenant_id,
        adds_special_tokens=prompt.add_special_tokens,
        has_offsets=has_echo,
    )
    (token_ids,) = found.token_ids
    check_tokens(prompt, token_ids)
    echo = Echo(prompt.text, token_ids, found.offsets[0]) if has_echo else None
    return PackedPrompt(pack_token_ids(token_ids), prompt.param, echo=echo)


async def _bad_words(words: Sequence[str], tenant_id: str, text: ServedText) -> BadWords:
    if not words:
        return ()
    texts = chain.from_iterable(map(bad_word_texts, words))
    found = await text.renderer.encode([[each] for each in texts], tenant_id=tenant_id)
    return tuple(dict.fromkeys(map(tuple, found.token_ids)))

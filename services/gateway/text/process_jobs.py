"""Messages between the gateway and a preparation process: frames of msgpack with their size.

ProcessSetup ────────────▶            jobs are of this model from now on
SelectModel ─────────────▶            or again of this one, whose setup it has
Job ─────────────────────▶            ◀──── Finished

Both sides retain the setups of the MAX_SETUPS models that were used last, in the same order, so the
gateway knows which ones a process has.
"""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any

import msgspec

from services.gateway.images.input_image import ImageContext, InputImage
from services.gateway.text.chat_template import TemplateSource
from shared.errors import GrammarTooComplex
from shared.messages import ImagePart

LIMIT_S = 2.0  # CPU time of a template, so that a busy or frozen machine does not matter
CHECK_LIMIT_S = 1.0  # CPU seconds of a grammar's check
LIMIT_S_PER_MIB = 1.0  # added for a body, whose decoding and tokenizing are linear in its size
MAX_PIXEL_BYTES = 512 << 20  # of one reply
IMAGES_LIMIT_S = 10.0  # added for images: one of 13 tiles takes 0.2 s
MAX_SETUPS = 32  # setups of one process; it has fewer tokenizers and vocabularies
SIZE = struct.Struct("!I")
MIB = 1 << 20
RENDER_TIMEOUT = f"the chat template exceeded {LIMIT_S:g} s on these messages"
ENCODE_TIMEOUT = "the tokenizer takes too much time or memory on this text"
BODY_TIMEOUT = "the body took too much CPU time to decode, render and tokenize"
CHECK_TIMEOUT = "the grammar takes too much time or memory"


class ProcessSetup(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A model. `template`: None for a model without one. `model_dir`: where the tokenizer is.
    For grammars: `eos_token_ids`, the model's; `family`: an encoded `Family`, empty for none;
    `added_ids`: of the tokenizer's added tokens, by text. `key`: differs between models, and
    between two loads of one model's files. `template_file`: as of `ModelText`.
    """

    template: TemplateSource | None
    model_dir: str = ""
    eos_token_ids: tuple[int, ...] = ()
    family: bytes = b""
    added_ids: Mapping[str, int] = msgspec.field(default_factory=dict)
    key: str = ""
    template_file: str = ""


NO_MODEL = ProcessSetup(None)  # for jobs that need none


class SelectModel(msgspec.Struct, frozen=True, array_like=True, tag=True):
    key: str


class NameJob(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Asks for the model that a request body names. `kind`: as in a BodyJob."""

    body: bytes
    kind: str


class RenderJob(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`values`: `TemplateValues` encoded in JSON, since a client's integers may have any size."""

    values: bytes


class TemplateValues(msgspec.Struct, frozen=True, array_like=True):
    """A conversation to render. `variables`: the client's, for the template."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    add_generation_prompt: bool = True
    variables: Mapping[str, Any] = msgspec.field(default_factory=dict)


class BodyJob(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A request body to decode, render and tokenize.

    `kind`: the name of the body's type. `max_context_tokens`, `max_input_tokens`: prompts that
    cannot fit are rejected before they are rendered; None: no limit is known. `stored`: the encoded
    state that the body refers to, if any. `model`: that the body is taken to name; None: none.
    `has_pixels`: whether the reply has those of the images.
    """

    kind: str
    body: bytes
    max_context_tokens: int | None = None
    max_input_tokens: int | None = None
    vocab_size: int | None = None
    stored: bytes = b""
    model: str | None = None
    images: ImageContext = ImageContext()
    has_pixels: bool = True


class ImageChatJob(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Conversations with the same images, to render and tokenize. `conversations`: the `values` of
    a RenderJob for each; the other fields as of a BodyJob.
    """

    conversations: list[bytes]
    given: list[InputImage]
    images: ImageContext
    max_context_tokens: int | None = None
    has_pixels: bool = True
    param: str = "messages"

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.conversations)) + sum(len(each.data) for each in self.given)


class EncodeJob(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Prompts to tokenize, in parts with a flag for literal text. `adds_special_tokens`: of a
    client's prompt, which has one part; None: of a rendered one. `has_offsets`: of a client's
    prompt; it takes several times as long.
    """

    prompts: list[list[tuple[bool, str]]]
    adds_special_tokens: bool | None = None
    has_offsets: bool = False

    @property
    def num_chars(self) -> int:
        return sum(len(text) for parts in self.prompts for _, text in parts)


class CheckJob(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`request`: an encoded `GrammarRequest`, whose grammar is planned and tried."""

    request: bytes


class TokenizedImage(msgspec.Struct, frozen=True, array_like=True):
    """An image of a prompt. `num_bytes`: of its pixels, which follow the reply unless those of the
    same image do; `pixels`: uint8, [tiles, 3, H, W].
    """

    part: ImagePart
    num_bytes: int
    pixels: bytearray = msgspec.field(default_factory=bytearray)


class TokenizedPrompt(msgspec.Struct, frozen=True, array_like=True):
    """`token_ids`: packed. `echo`: the prompt's text and the start of each token, if requested.
    `num_calls`: tool calls in the conversation.
    """

    param: str
    token_ids: bytes
    is_chat: bool = False
    echo: tuple[str, list[int]] | None = None
    num_calls: int = 0
    images: list[TokenizedImage] = []


class Named(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The reply to a NameJob. None: the body names no model, or is invalid."""

    model: str | None


class Rendered(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The parts of the prompt, each with a flag for literal text."""

    parts: list[tuple[bool, str]]


class Encoded(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The token ids of each prompt, and the start of each token if the job has offsets."""

    token_ids: list[list[int]]
    offsets: list[list[int]]


class PreparedBody(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """`body`: the same JSON with short prompts in place of its own, the body unchanged, or the
    response.
    """

    body: bytes
    prompts: list[TokenizedPrompt]


class Checked(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """`plan`: an encoded `CheckedPlan`; empty: the output is free."""

    plan: bytes


class JobRejected(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """`code`: of an InvalidRequest or of one of its subclasses."""

    reason: str
    param: str | None = "messages"
    code: str = "invalid_request"


class Unavailable(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The process cannot read the model's files."""

    reason: str


Job = NameJob | RenderJob | BodyJob | ImageChatJob | EncodeJob | CheckJob
Reply = Named | Rendered | PreparedBody | Encoded | Checked | JobRejected | Unavailable


class JobFinished(msgspec.Struct, frozen=True, array_like=True):
    """`cpu_s`: CPU seconds that the job used."""

    reply: Reply
    cpu_s: float


_encode_into = msgspec.msgpack.Encoder().encode_into
_values_decoder = msgspec.json.Decoder(TemplateValues)


def render_job(*values: Any) -> RenderJob:
    """Returns a job with the fields of TemplateValues."""
    return RenderJob(encoded_values(*values))


def encoded_values(*values: Any) -> bytes:
    return msgspec.json.encode(TemplateValues(*values))


def template_values(values: bytes) -> TemplateValues:
    return _values_decoder.decode(values)


def limit_s(job: Job | ProcessSetup | JobRejected) -> float:
    """Returns the CPU seconds after which the process is killed."""
    match job:
        case EncodeJob():
            return LIMIT_S + job.num_chars / MIB * LIMIT_S_PER_MIB
        case BodyJob():
            of_images = IMAGES_LIMIT_S if job.images.max_images else 0.0
            return LIMIT_S + of_images + (len(job.body) + len(job.stored)) / MIB * LIMIT_S_PER_MIB
        case ImageChatJob():
            return LIMIT_S + IMAGES_LIMIT_S + job.num_bytes / MIB * LIMIT_S_PER_MIB
        case NameJob():
            return LIMIT_S + len(job.body) / MIB * LIMIT_S_PER_MIB
        case CheckJob():
            return CHECK_LIMIT_S
        case _:
            return LIMIT_S


def over_limit(job: Job) -> JobRejected:
    """Returns the reply to a job whose process exceeded a limit."""
    match job:
        case BodyJob() | NameJob() | ImageChatJob():
            return JobRejected(BODY_TIMEOUT, None)
        case EncodeJob():
            return JobRejected(ENCODE_TIMEOUT, None)
        case CheckJob():
            return JobRejected(CHECK_TIMEOUT, None, GrammarTooComplex.code)
        case RenderJob():
            return JobRejected(RENDER_TIMEOUT)


def without_pixels(reply: Reply) -> tuple[Reply, list[bytearray]]:
    """Returns the reply without the pixels of its images, and these, in their order."""
    if not isinstance(reply, PreparedBody):
        return reply, []
    pixels = [each.pixels for prompt in reply.prompts for each in prompt.images if each.pixels]
    return (_with_pixels(reply, repeat(bytearray())), pixels) if pixels else (reply, [])


async def with_pixels(reply: Reply, read: Callable[[int], Awaitable[bytearray]]) -> Reply:
    """Returns the reply with the pixels that follow it. `read`: reads a number of bytes. Raises
    DecodeError for too many.
    """
    if not isinstance(reply, PreparedBody):
        return reply
    sizes = [each.num_bytes for prompt in reply.prompts for each in prompt.images]
    if sum(sizes) > MAX_PIXEL_BYTES:
        raise msgspec.DecodeError("the pixels of the images take too many bytes")
    pixels = [await read(each) for each in sizes if each]
    return _with_pixels(reply, iter(pixels)) if pixels else reply


def _with_pixels(reply: PreparedBody, pixels: Iterator[bytearray]) -> PreparedBody:
    """Puts the next of `pixels` in each image that has some."""

    def image(given: TokenizedImage) -> TokenizedImage:
        return msgspec.structs.replace(given, pixels=next(pixels)) if given.num_bytes else given

    prompts = [
        msgspec.structs.replace(each, images=[image(given) for given in each.images])
        for each in reply.prompts
    ]
    return msgspec.structs.replace(reply, prompts=prompts)


def frame(message: ProcessSetup | SelectModel | Job | JobFinished) -> bytearray:
    """Returns the encoded message with its size. Copies a body of megabytes once."""
    buffer = bytearray(SIZE.size)
    _encode_into(message, buffer, SIZE.size)
    SIZE.pack_into(buffer, 0, len(buffer) - SIZE.size)
    return buffer

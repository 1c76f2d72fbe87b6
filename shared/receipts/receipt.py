"""The content of a receipt: where, and with which weights, a response was computed.

    response ──every output ended──▶ AnswerReceipt as JSON ──its tenant reads it──▶ signed, `jws.py`

A receipt has no text and no token: prompts, outputs and constraints are in it as hashes under a
salt (`salted.py`), which is not in it. Times are seconds since 1970 by the clock of the gateway.
The order of the fields is that of the signed bytes.
"""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from hashlib import sha256
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shared.errors import ConfigError
from shared.transport.wire_errors import UNREADABLE

Retention = Literal["standard", "zero"]
Hash = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_-]{43}\Z")]  # 32 bytes as base64url
_encode = msgspec.json.Encoder().encode


class ServedWeights(msgspec.Struct, frozen=True, kw_only=True):
    """A model. `revision` is its name in the catalogue, empty for a model that is not in it;
    `weights` is the digest of its config and weights.
    """

    name: str
    revision: str = ""
    weights: str


class PlacedProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process and its place. `site` is empty without sites, `region` where it is not known."""

    id: str
    site: str = ""
    region: str = ""


class KvHop(msgspec.Struct, frozen=True, kw_only=True):
    """KV of `num_tokens` tokens of the prompt, which `source` pushed to the decode worker."""

    source: PlacedProcess
    num_tokens: int


class DecodeTry(msgspec.Struct, frozen=True, kw_only=True):
    """One placement of a request: a second one after the loss of a worker. `prefill` computed the
    prompt; None: the decode worker did, or reported nothing before it was lost. `numerics` are
    empty in the latter case. `num_tokens` tokens arrived from it, `num_cached_tokens` of the prompt
    were in the cache of the process that computed the rest.
    """

    decode: PlacedProcess
    prefill: PlacedProcess | None = None
    kv_hops: tuple[KvHop, ...] = ()
    numerics: str = ""
    num_tokens: int = 0
    num_cached_tokens: int = 0
    outcome: str


class ReceiptSampling(msgspec.Struct, frozen=True, kw_only=True):
    """What the tokens depend on besides prompt, weights and numerics. `seed` is a decimal u64.
    `constraints` is the salted hash of all that may show the text: stop strings and tokens, biases,
    bad words, grammar, budget of reasoning.
    """

    seed: str
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    min_tokens: int
    ignore_eos: bool
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    constraints: Hash


class OutputHash(msgspec.Struct, frozen=True, kw_only=True):
    """The output of one choice. `tokens` is the salted hash of its tokens, or of an embedding's
    bytes. `outcome` is a finish reason or an error code.
    """

    num_tokens: int
    tokens: Hash
    outcome: str


class PromptReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt of the response, and its choices. `prompt` is the salted hash of its tokens and of
    its images, as the model sees them.
    """

    num_prompt_tokens: int
    num_images: int = 0
    prompt: Hash
    sampling: ReceiptSampling
    choices: tuple[OutputHash, ...]
    tries: tuple[DecodeTry, ...]


class AnswerReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """The receipt of one response. `salt` is the hash of the salt. `adapter` is that of the
    weights; None: none.
    """

    version: Literal[1] = 1
    request_id: str
    tenant: str
    gateway: PlacedProcess
    release: str
    endpoint: str
    model: ServedWeights
    adapter: str | None = None
    retention: Retention
    region_class: str
    allowed_regions: tuple[str, ...] | None
    received_at: float
    first_token_at: float | None
    finished_at: float
    salt: Hash
    prompts: tuple[PromptReceipt, ...]

    @property
    def payload(self) -> bytes:
        """The bytes that are signed: equal receipts have equal ones."""
        return _encode(self)


class IssuedReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """What the tenant reads."""

    request_id: str
    receipt: str
    """A compact JWS."""
    hash: str
    """SHA-256 of its payload, in base64url."""
    salt: str
    """For the tenant alone: who has it can test guesses of the prompt."""


def encoded_bytes(data: bytes) -> str:
    """Returns base64url without padding, as JWS has it."""
    return urlsafe_b64encode(data).rstrip(b"=").decode()


def decoded_bytes(text: str) -> bytes:
    """Decodes base64url without padding. Raises ValueError for anything else: one value has one
    spelling.
    """
    try:
        data = urlsafe_b64decode(text.encode("ascii") + b"=" * (-len(text) % 4))
    except ValueError:
        data = b""
    if encoded_bytes(data) != text:
        raise ValueError("not base64url")
    return data


def payload_hash(payload: bytes) -> str:
    return encoded_bytes(sha256(payload).digest())


def receipt_of(payload: bytes) -> AnswerReceipt:
    """Decodes a payload. Raises ConfigError for one of another form."""
    try:
        return msgspec.json.decode(payload, type=AnswerReceipt)
    except UNREADABLE as error:
        raise ConfigError(f"the payload is no receipt of this release: {error}") from None

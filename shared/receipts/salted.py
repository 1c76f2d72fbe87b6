"""Hashes under the salt of one receipt: HMAC-SHA-256 with the salt as the key.

Without the salt, equal prompts have different hashes and no guess can be tested. What is hashed
begins with its kind and its place in the response, so that no two places have equal hashes.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from hashlib import sha256

import msgspec

from shared.messages import ImagePart, SamplingParams
from shared.receipts.receipt import ReceiptSampling, encoded_bytes

SALT_BYTES = 16
_encode = msgspec.msgpack.Encoder().encode


class ReceiptSalt:
    def __init__(self, salt: bytes) -> None:
        self.salt = salt

    @property
    def text(self) -> str:
        return encoded_bytes(self.salt)

    @property
    def commitment(self) -> str:
        """The hash that a receipt has of its salt."""
        return encoded_bytes(sha256(b"hearth receipt salt\0" + self.salt).digest())

    def prompt(self, index: int, packed: bytes, images: Sequence[ImagePart] = ()) -> str:
        """`packed` are the token ids of prompt `index` of the response, as u32 little-endian. The
        tokens of an image say nothing of it: its hash stands for it.
        """
        kind = b"prompt\0" if not images else b"prompt with %d images\0" % len(images)
        hashes = b"".join(each.image_hash for each in images)
        return self._hash(b"%b%d\0" % (kind, index), hashes + packed)

    def output(self, index: int, choice: int, data: bytes) -> str:
        """`data` are packed token ids of a choice, or an embedding."""
        return self._hash(b"output\0%d\0%d\0" % (index, choice), data)

    def sampling(
        self, index: int, params: SamplingParams, stop: tuple[str, ...]
    ) -> ReceiptSampling:
        """`stop` are the stop strings, which the gateway alone knows."""
        constraints = (
            *(stop, params.stop_token_ids, params.logit_bias, params.bad_words),
            *(params.grammar, params.thinking),
        )
        return ReceiptSampling(
            seed=str(params.seed),
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            min_tokens=params.min_tokens,
            ignore_eos=params.ignore_eos,
            repetition_penalty=params.repetition_penalty,
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            constraints=self._hash(b"constraints\0%d\0" % index, _encode(constraints)),
        )

    def _hash(self, place: bytes, data: bytes) -> str:
        return encoded_bytes(hmac.digest(self.salt, place + data, sha256))

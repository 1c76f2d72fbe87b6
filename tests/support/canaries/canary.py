"""What must not be found: a tenant's texts, tokens, block hashes and KV, in each of their forms.

A form is cut into windows of WINDOW bytes, `step` bytes apart, so that a fragment of at least
WINDOW + step - 1 bytes contains one, wherever it begins and ends. Sixteen bytes are four packed
token ids, five in msgpack, a block hash, or the KV of a simulated token: by chance none occurs.
"""

from __future__ import annotations

import json
from array import array
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from shared.packing import pack_token_ids

WINDOW = 16
TEXT_STEP = 8
BASE64_ALIGNMENTS = range(3)
MSGPACK_STEP = 3  # bytes of a token id from 256 to 65,535


@dataclass(frozen=True, slots=True)
class Form:
    """One way to write something of a canary."""

    name: str
    data: bytes
    step: int

    def windows(self) -> Iterator[bytes]:
        last = len(self.data) - WINDOW
        for start in range(0, last + 1, self.step):
            yield self.data[start : start + WINDOW]
        if last > 0 and last % self.step:
            yield self.data[last:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """The data of one tenant. `token_ids` are its prompts and answers; `kv` are bytes of its cache,
    each piece as it lies in memory or in a frame.
    """

    tenant_id: str
    texts: tuple[str, ...] = ()
    token_ids: tuple[Sequence[int], ...] = ()
    block_hashes: tuple[bytes, ...] = ()
    kv: tuple[bytes, ...] = ()
    others: Mapping[str, bytes] = field(default_factory=dict)  # as they are, by name of the form

    def forms(self) -> Iterator[Form]:
        for text in self.texts:
            yield from _forms_of_text(text)
        for token_ids in self.token_ids:
            yield from _forms_of_tokens(token_ids)
        for block_hash in self.block_hashes:
            yield from _forms_of_bytes("block hash", block_hash, WINDOW)
        for kv in self.kv:
            yield Form("KV", kv, WINDOW // 2)
        for name, piece in self.others.items():
            yield Form(name, piece, WINDOW // 2)


def _forms_of_text(text: str) -> Iterator[Form]:
    data = text.encode()
    yield Form("text", data, TEXT_STEP)
    for escaped in (msgspec.json.encode(text)[1:-1], json.dumps(text)[1:-1].encode()):
        if escaped != data:
            yield Form("text in JSON", escaped, TEXT_STEP)
    yield from _base64("text", data)


def _forms_of_tokens(token_ids: Sequence[int]) -> Iterator[Form]:
    yield from _forms_of_bytes("token ids, packed", pack_token_ids(token_ids), 4)
    yield Form("token ids of 64 bits", array("q", token_ids).tobytes(), 8)
    yield Form(
        "token ids in msgpack", b"".join(map(msgspec.msgpack.encode, token_ids)), MSGPACK_STEP
    )
    for separator in (",", ", "):
        joined = separator.join(map(str, token_ids)).encode()
        yield Form("token ids in JSON", joined, TEXT_STEP)


def _forms_of_bytes(name: str, data: bytes, step: int) -> Iterator[Form]:
    """Bytes are written in base64 by JSON, and in hexadecimal by Redis keys."""
    yield Form(name, data, step)
    yield Form(f"{name}, hexadecimal", data.hex().encode(), 2 * step)
    yield from _base64(name, data)


def _base64(name: str, data: bytes) -> Iterator[Form]:
    """Yields what stands for the data if 0, 1 or 2 bytes precede it in what is encoded."""
    for before in BASE64_ALIGNMENTS:
        whole = data[-before % 3 :]
        whole = whole[: len(whole) // 3 * 3]
        for encode in (b64encode, urlsafe_b64encode):
            yield Form(f"{name}, base64", encode(whole), TEXT_STEP)

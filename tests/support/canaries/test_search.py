"""The search for a tenant's data finds each form of it, wherever it begins, and nothing else."""

from __future__ import annotations

from array import array
from base64 import b64encode
from random import Random

import msgspec
import pytest

from shared.messages import Choice
from shared.packing import pack_token_ids
from tests.support.canaries.canary import Canary
from tests.support.canaries.search import CanarySearch, Pieces

RANDOM = Random(4)
TEXT = 'the recipe of Ms 3f9a0c: 17 grams of cobalt, née "violet"'
TOKENS = [RANDOM.randrange(10_000, 32_000) for _ in range(40)]
HASH, KV = RANDOM.randbytes(16), RANDOM.randbytes(64)
CANARY = Canary(tenant_id="t", texts=(TEXT,), token_ids=(TOKENS,), block_hashes=(HASH,), kv=(KV,))
WRITTEN = {
    "text": TEXT[3:30].encode(),
    "text in JSON": msgspec.json.encode({"messages": [TEXT]}),
    "text, base64": b64encode(b"x" + TEXT.encode()),
    "token ids, packed": msgspec.msgpack.encode(
        Choice(choice_index=0, output_token_ids=pack_token_ids(TOKENS[5:12]))
    ),
    "token ids, packed, base64": msgspec.json.encode({"p": b"12" + pack_token_ids(TOKENS)}),
    "token ids, packed, hexadecimal": pack_token_ids(TOKENS).hex().encode(),
    "token ids of 64 bits": array("q", TOKENS[7:10]).tobytes(),
    "token ids in msgpack": msgspec.msgpack.encode({"ids": TOKENS[9:20]}),
    "token ids in JSON": msgspec.json.encode(TOKENS[20:30]),
    "block hash": b"\xc4\x10" + HASH,
    "block hash, hexadecimal": f"hearth:t:prefix:{HASH.hex()}".encode(),
    "KV": KV[3:32],
}


@pytest.mark.parametrize("form", WRITTEN)
def test_every_form_is_found_at_every_alignment(form: str) -> None:
    search = CanarySearch([CANARY])
    for before in range(17):
        data = RANDOM.randbytes(before) + WRITTEN[form] + RANDOM.randbytes(50)
        found = search.find(data)
        assert form in {each.form for each in found}, before
        assert {each.tenant_id for each in found} == {"t"}


def test_other_data_is_not_found() -> None:
    others = [RANDOM.randrange(10_000, 32_000) for _ in range(100_000)]
    search = CanarySearch([CANARY])
    assert search.find(RANDOM.randbytes(1_000_000) + pack_token_ids(others) + bytes(1000)) == []
    assert search.find(pack_token_ids(TOKENS[:3])) == []
    assert search.find(b"") == search.find(b"short") == []


def test_pieces_are_apart_and_keep_their_notes() -> None:
    search, pieces = CanarySearch([CANARY]), Pieces()
    for note in range(100):
        pieces.add(note, HASH[:8])
        pieces.add(note, HASH[8:])
    pieces.add("here", b"..." + HASH)
    pieces.add("after", b"...")
    assert [(note, each.form) for note, each in pieces.take(search)] == [("here", "block hash")]
    assert (len(pieces), pieces.take(search)) == (0, [])


def test_canaries_are_told_apart() -> None:
    search = CanarySearch([CANARY])
    search.add([Canary(tenant_id="u", block_hashes=(HASH[::-1],))])
    found = search.find(HASH + b"-" + HASH[::-1])
    assert [(each.tenant_id, each.start) for each in sorted(found)] == [("t", 0), ("u", 17)]

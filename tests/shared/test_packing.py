from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import InvalidRequest
from shared.packing import pack_hashes, pack_token_ids, unpack_hashes, unpack_token_ids


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_token_ids_round_trip(token_ids: list[int]) -> None:
    packed = pack_token_ids(token_ids)
    assert len(packed) == 4 * len(token_ids)
    assert unpack_token_ids(packed) == token_ids


def test_token_ids_are_little_endian() -> None:
    assert pack_token_ids([1, 0x01020304]) == b"\x01\0\0\0\x04\x03\x02\x01"


@given(st.lists(st.binary(min_size=16, max_size=16)))
def test_hashes_round_trip(hashes: list[bytes]) -> None:
    assert unpack_hashes(pack_hashes(hashes)) == hashes


@pytest.mark.parametrize("token_ids", [[-1], [2**32], [1.5], ["1"], [None]])
def test_invalid_token_id_is_rejected(token_ids: list) -> None:
    with pytest.raises(InvalidRequest):
        pack_token_ids(token_ids)


def test_invalid_length_is_rejected() -> None:
    with pytest.raises(InvalidRequest):
        unpack_token_ids(bytes(7))
    with pytest.raises(InvalidRequest):
        unpack_hashes(bytes(17))

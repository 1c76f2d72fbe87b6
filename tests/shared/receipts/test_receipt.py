"""The payload of receipts, and the hashes under their salts."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ConfigError
from shared.grammar.spec import GrammarSpec
from shared.messages import ImagePart, SamplingParams
from shared.packing import pack_token_ids
from shared.receipts.receipt import AnswerReceipt, receipt_of
from shared.receipts.salted import SALT_BYTES, ReceiptSalt
from tests.support.services.receipts import receipt

SALT = ReceiptSalt(bytes(range(SALT_BYTES)))
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=8)
names = st.text(max_size=12)


@given(names, names, st.integers(0, 2**64 - 1), st.floats(0, 2), st.lists(names, max_size=2))
def test_payload_is_read_back(
    request_id: str, region: str, seed: int, temperature: float, regions: list[str]
) -> None:
    found = receipt(
        request_id=request_id,
        region=region,
        seed=seed,
        temperature=temperature,
        allowed_regions=tuple(regions),
    )
    assert receipt_of(found.payload) == found
    assert receipt_of(found.payload).payload == found.payload


@given(st.data())
def test_every_changed_field_changes_the_payload(data: st.DataObject) -> None:
    found = receipt()
    plain = msgspec.to_builtins(found)
    name = data.draw(st.sampled_from(sorted(plain)))
    plain[name] = [plain[name], "changed"]
    assert msgspec.json.encode(plain) != found.payload


def test_payload_of_another_form_is_rejected() -> None:
    later = receipt().payload.replace(b'"version":1', b'"version":2')
    for payload in (later, b"{}", b"\xff", b"[" * 10_000):
        with pytest.raises(ConfigError, match="no receipt of this release"):
            receipt_of(payload)


@given(TOKENS, TOKENS, st.binary(min_size=SALT_BYTES, max_size=SALT_BYTES))
def test_hashes_depend_on_tokens_places_and_salt(
    one: list[int], other: list[int], salt: bytes
) -> None:
    first, second = pack_token_ids(one), pack_token_ids(other)
    assert (SALT.prompt(0, first) == SALT.prompt(0, second)) == (one == other)
    places = {SALT.prompt(0, first), SALT.prompt(1, first), SALT.output(0, 0, first)}
    places |= {SALT.output(0, 1, first), SALT.output(1, 0, first)}
    assert len(places) == 5
    is_same = salt == SALT.salt
    assert (ReceiptSalt(salt).prompt(0, first) == SALT.prompt(0, first)) == is_same
    assert (ReceiptSalt(salt).commitment == SALT.commitment) == is_same


def test_images_are_part_of_the_prompt() -> None:
    packed = pack_token_ids([1, 2])
    images = [
        ImagePart(first_token=0, num_tokens=1, image_hash=bytes([each]) * 16, grid=(0, 0))
        for each in range(2)
    ]
    found = {SALT.prompt(0, packed, part) for part in ([], images[:1], images[1:], images)}
    assert len(found) == 4
    assert SALT.prompt(0, packed) == SALT.prompt(0, packed, [])


@pytest.mark.parametrize(
    "change",
    [
        {"stop_token_ids": (7,)},
        {"logit_bias": ((3, 1.0),)},
        {"bad_words": ((1, 2),)},
        {"grammar": GrammarSpec(kind="regex", source="a*")},
    ],
)
def test_what_may_show_text_is_in_one_hash(change: dict[str, object]) -> None:
    params = SamplingParams(seed=2**64 - 1, max_tokens=5)
    found = SALT.sampling(0, params, ())
    other = SALT.sampling(0, msgspec.structs.replace(params, **change), ())
    assert found.seed == "18446744073709551615"
    assert found.constraints not in (
        other.constraints,
        SALT.sampling(0, params, ("x",)).constraints,
    )
    assert msgspec.structs.replace(other, constraints=found.constraints) == found


def test_receipt_has_no_field_for_text() -> None:
    """Each text field is a name, a hash, a number or an outcome."""
    kinds = {each.name for each in msgspec.structs.fields(AnswerReceipt)}
    assert kinds.isdisjoint({"text", "messages", "content", "token_ids", "stop"})

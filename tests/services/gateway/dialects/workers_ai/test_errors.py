"""The numbers of Cloudflare's envelope, for every error that a response can hold."""

from __future__ import annotations

import msgspec
import pytest

from services.gateway.dialects.workers_ai.errors import BUSY, envelope, number_of
from services.gateway.dialects.workers_ai.paths import has_own_envelope
from shared.errors import HearthError, InvalidRequest, NoCapacity, UnknownModel
from tests.error_table import error_classes
from tests.support.grids import in_one_test

# The statuses of Cloudflare's table by number; 3043, 7000, 7001 and 10000 are not in it.
STATUSES = {
    3003: {400},
    3006: {413},
    3007: {408},
    3008: {408},
    3023: {403},
    3036: {429},
    3040: {429},
    3042: {404},
    3043: {500, 503, 507},
    5004: {400},
    5005: {405},
    5007: {400},
    5018: {403},
    7000: {404},
    7001: {405},
    10000: {401, 403},
}
EXPECTED = {
    "invalid_request": 5004,
    "missing_body": 3003,
    "model_not_found": 5007,
    "malformed_model_id": 3042,
    "lora_not_supported": 5005,
    "invalid_api_key": 10000,
    "foreign_account": 10000,
    "model_not_allowed": 5018,
    "not_found": 7000,
    "method_not_allowed": 7001,
    "deadline_exceeded": 3007,
    "payload_too_large": 3006,
    "context_length_exceeded": 3006,
    "rate_limit_exceeded": 3036,
    "concurrency_exceeded": 3036,
    "overloaded": 3040,
    "no_capacity": 3040,
    "worker_busy": 3040,
    "internal_error": 3043,
    "store_unavailable": 3043,
}


def test_every_error_has_a_number_with_its_status() -> None:
    for error_class in error_classes():
        number = number_of(error_class)
        assert number.status in STATUSES[number.code], error_class
        assert number.code == EXPECTED.get(error_class.code, number.code)
        is_of_server = error_class.http_status >= 500
        assert (number.code in (3007, 3040, 3043)) >= is_of_server, error_class  # it may help


def test_expected_codes_exist() -> None:
    assert set(EXPECTED) <= {each.code for each in error_classes()}


def test_envelope() -> None:
    error = UnknownModel("the model 'x' does not exist", param="model")
    assert msgspec.json.encode(envelope(error)) == (
        b'{"result":null,"success":false,'
        b'"errors":[{"code":5007,"message":"the model \'x\' does not exist"}],"messages":[]}'
    )


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (InvalidRequest("is wrong", param="top_p"), "top_p: is wrong"),
        (InvalidRequest("top_p is wrong", param="top_p"), "top_p is wrong"),
        (NoCapacity("no worker"), f"{BUSY} (no worker)"),
        (InvalidRequest("a" * 600), "a" * 499 + "…"),
    ],
)
def test_message_names_the_field_and_is_bounded(error: HearthError, message: str) -> None:
    (entry,) = envelope(error).errors
    assert entry.message == message


@in_one_test(
    ("path", "is_own"),
    [
        ("/client/v4/accounts/t/ai/run/@cf/a/b", True),
        ("/accounts/t/ai/run/@cf/a/b", True),
        ("/accounts/t/ai/models/search", True),
        ("/client/v4", True),
        ("/client/v4/user/tokens/verify", True),
        ("/accounts/t/ai/run/x\n/ai/v1", True),
        ("/accounts/t/ai/v1", False),
        ("/accounts/t/ai/v1/chat/completions", False),
        ("/client/v4/accounts/t/ai/v1/models", False),
        ("/accounts/t/ai/v10/models", True),
        ("/accounts", False),
        ("/v1/chat/completions", False),
        ("/client/v40/x", False),
    ],
)
def test_path_decides_the_envelope(path: str, is_own: bool) -> None:
    assert has_own_envelope(path) == is_own

"""What clients are told about a failure whose details are for operators."""

from __future__ import annotations

import msgspec
import pytest
import structlog

from services.gateway.dialects.dialect_table import DIALECTS
from services.gateway.dialects.error_response import error_response
from services.gateway.dialects.open_dialects import dialect_of
from shared.errors import InvalidRequest
from shared.store import StoreRejected

REPLY = "Redis returned an error: @user_script: 12: -MISCONF No space left on device"
PATHS = ("/v1/prefixes/rules", "/v1/messages", "/client/v4/accounts/a/ai/run/m")


@pytest.mark.parametrize("path", PATHS)
def test_reply_of_redis_is_logged_and_not_sent(path: str) -> None:
    with structlog.testing.capture_logs() as lines:
        response = error_response(dialect_of(path, DIALECTS), StoreRejected(REPLY), "r1")
        body = msgspec.json.encode(response.content).decode()
    assert response.status_code == 503
    assert "Redis answered with an error" in body and "MISCONF" not in body
    assert [(each["request_id"], each["error"]) for each in lines] == [("r1", REPLY)]


def test_other_errors_are_sent_as_they_are() -> None:
    with structlog.testing.capture_logs() as lines:
        response = error_response(DIALECTS[0], InvalidRequest("no"), "r1")
    assert b"no" in msgspec.json.encode(response.content) and not lines

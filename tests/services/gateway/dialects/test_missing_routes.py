from __future__ import annotations

import pytest

from services.gateway.dialects.missing_routes import NOTHING, missing_route


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/v1/batches", "lower priority"),
        ("/v1/batches/batch_1/cancel", "lower priority"),
        ("/v1/messages/batches", "one by one"),
        ("/v1/files/file-1", "stores no files"),
        ("/v1/audio/speech", "audio"),
        ("/api/chat", "Ollama"),
        ("/chat/completions", "must end with /v1"),
        ("/models", "must end with /v1"),
        ("/v1/v1/messages", "leave it out"),
    ],
)
def test_message_says_what_to_do(path: str, told: str) -> None:
    assert missing_route(path).startswith(f"{NOTHING}: ")
    assert told in missing_route(path)


@pytest.mark.parametrize(
    "path", ["/", "/none", "/v1/none", "/v1/filesystem", "//", "/apis", "*", ""]
)
def test_other_paths_have_no_hint(path: str) -> None:
    assert missing_route(path) == NOTHING

"""What the path sees of a whole cluster: nothing with TLS and AEAD, all of it without them."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.packing import pack_token_ids
from shared.tenancy.tenant import digest_of
from tests.services.gateway.model_dir import write_model_dir
from tests.services.live_cluster import (
    API_KEY,
    NATS_PASSWORD,
    REDIS_PASSWORD,
    Link,
    LiveCluster,
    live_cluster,
)

PROMPT = "my salary is 7,301 and my door opens with the word heliotrope, so keep it to yourself"
PREFIX = "you are the assistant of a bank whose vault opens with the word marzipan"

# What each link shows without encryption.
READABLE: dict[Link, set[str]] = {
    "http": {"prompt", "prompt as JSON", "named prefix", "response", "API key"},
    "nats": {"prompt as token ids", "NATS password"},
    "redis": {"named prefix", "digest of the API key", "Redis password"},
    "kv": {"KV of the prompt"},
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_dir(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.parametrize("has_tls", [True, False])
async def test_path_reads_secrets_only_without_encryption(
    tmp_path: Path, model_dir: Path, has_tls: bool
) -> None:
    security = "aead" if has_tls else "none"
    async with live_cluster(tmp_path, model_dir, has_tls=has_tls, security=security) as cluster:
        secrets = await secrets_of(cluster)
        recorded = {link: relay.recorded for link, relay in cluster.relays.items()}
        assert all(recorded.values())
        seen = {link: found_in(stream, secrets) for link, stream in recorded.items()}
    assert seen == ({link: set() for link in READABLE} if has_tls else READABLE)


async def secrets_of(cluster: LiveCluster) -> dict[str, list[bytes]]:
    """Sends a chat and stores a prefix; returns the bytes that nobody on the path may read."""
    response = await cluster.chat(PROMPT)
    served = response.json()["hearth"]
    assert served["prefill_worker"] == "prefill-1"
    states = [bytes(row) for row in cluster.runners["prefill"]._kv if row.any()]
    assert len(states) == served["num_pushed_tokens"] > 64
    prefix = {"model": "tiny", "system": PREFIX}
    (await cluster.http.put("/v1/prefixes/bank", json=prefix)).raise_for_status()
    token_ids = cluster.gateway.files.tokenizer.encode([PROMPT])
    return {
        "prompt": [PROMPT.encode()],
        "prompt as JSON": [b'"content":"' + PROMPT.encode()],
        "prompt as token ids": [pack_token_ids(token_ids[2:-2])],
        "named prefix": [PREFIX.encode()],
        "response": [response.content],
        "KV of the prompt": [half for each in states for half in (each[:8], each[8:])],
        "API key": [API_KEY.encode()],
        "digest of the API key": [digest_of(API_KEY).encode()],
        "NATS password": [NATS_PASSWORD.encode()],
        "Redis password": [REDIS_PASSWORD.encode()],
    }


def found_in(stream: bytes, secrets: dict[str, list[bytes]]) -> set[str]:
    """The names of those of which any part is in the stream."""
    return {name for name, parts in secrets.items() if any(part in stream for part in parts)}

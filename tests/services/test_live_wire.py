"""What the path sees of a whole cluster: nothing with TLS and AEAD, all of it without them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.services.live_cluster import Link, live_cluster, secrets_of
from tests.support.services.model_dir import write_model_dir

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


def found_in(stream: bytes, secrets: dict[str, list[bytes]]) -> set[str]:
    """The names of those of which any part is in the stream."""
    return {name for name, parts in secrets.items() if any(part in stream for part in parts)}

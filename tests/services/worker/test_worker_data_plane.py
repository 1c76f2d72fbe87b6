from __future__ import annotations

from pathlib import Path

import pytest

from services.worker.data_plane import receive_kv
from shared.config import WorkerConfig
from shared.errors import ConfigError


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
async def test_address_of_another_host_is_a_configuration_error(host: str) -> None:
    """192.0.2.0/24 is reserved for documentation: it is no host's (RFC 5737)."""
    config = WorkerConfig(
        process_id="worker-1",
        nats_url="nats://worker-1:secret@127.0.0.1:4222",
        model_dir=Path("shared/demo_model"),
        data_plane_host=host,
    )
    with pytest.raises(ConfigError, match=f"data_plane_host: cannot receive KV on '{host}'"):
        await receive_kv(config, b"i" * 16, None, None)

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from services.worker.data_plane import receive_kv
from shared.config import WorkerConfig
from shared.errors import ConfigError


def config_of(**options: object) -> WorkerConfig:
    url = "nats://worker-1:secret@127.0.0.1:4222"
    model_dir = Path("shared/demo_model")
    return WorkerConfig(process_id="worker-1", nats_url=url, model_dir=model_dir, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
async def test_address_of_another_host_is_a_configuration_error(host: str) -> None:
    """192.0.2.0/24 is reserved for documentation: it is no host's (RFC 5737)."""
    config = config_of(data_plane_host=host)
    with pytest.raises(ConfigError, match=f"data_plane_host: cannot receive KV on '{host}'"):
        await receive_kv(config, b"i" * 16, None, None)


async def test_worker_listens_at_the_port_that_a_firewall_opens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = config_of(data_plane_port=taken.getsockname()[1])
        where = f"'127.0.0.1', port {config.data_plane_port}"
        with pytest.raises(ConfigError, match=f"cannot receive KV on {where}: .*in use"):
            await receive_kv(config, b"i" * 16, None, None)
    server = await receive_kv(config, b"i" * 16, None, None)
    assert server.address.port == config.data_plane_port
    await server.close()

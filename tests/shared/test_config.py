from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shared.config import (
    GatewayConfig,
    KvIndexConfig,
    ProcessConfig,
    SchedulerConfig,
    WorkerConfig,
    check,
)
from shared.errors import ConfigError

NATS = "nats://u:p@127.0.0.1:4222"
REDIS = "redis://127.0.0.1:6379/0"


def valid_configs(tmp_path: Path) -> list[ProcessConfig]:
    return [
        SchedulerConfig(nats_url=NATS, process_id="s", local_prefill_tokens=0),
        KvIndexConfig(nats_url=NATS, process_id="i", redis_url="unix:///run/redis.sock"),
        GatewayConfig(nats_url=NATS, process_id="g", redis_url=REDIS, model_dir=tmp_path),
        WorkerConfig(nats_url="tls://host", process_id="w", model_dir=tmp_path),
    ]


def test_valid_configs_pass(tmp_path: Path) -> None:
    for config in valid_configs(tmp_path):
        check(config)


@pytest.mark.parametrize(
    ("index", "change", "message_start"),
    [
        (0, {"nats_url": "http://x"}, "nats_url"),
        (0, {"nats_url": "nats://h:port"}, "nats_url"),
        (0, {"process_id": ""}, "process_id"),
        (0, {"process_id": "a.b.c"}, "process_id"),
        (0, {"max_queued_requests": 0}, "max_queued_requests"),
        (0, {"max_queued_tokens": -1}, "max_queued_tokens"),
        (0, {"local_prefill_tokens": -1}, "local_prefill_tokens"),
        (0, {"site": "a/b"}, "site 'a/b' may have letters"),
        (1, {"redis_url": "nats://x"}, "redis_url"),
        (1, {"prefix_ttl_s": 0}, "prefix_ttl_s"),
        (2, {"http_port": 65536}, "http_port"),
        (2, {"site": "a.b"}, "site 'a.b' may have letters"),
        (2, {"kv_networks": ("10.0.0.0/8",)}, "kv_networks needs a site"),
        (
            2,
            {"site": "a", "kv_networks": ("10.0.0.1/8",)},
            "kv_networks '10.0.0.1/8' is no network",
        ),
        (2, {"max_requests": 0}, "max_requests"),
        (2, {"model_dir": Path("/nowhere")}, "model_dir"),
        (3, {"dtype": "int8"}, "dtype"),
        (3, {"num_threads": -1}, "num_threads"),
        (3, {"weights": "small"}, "weights"),
        (3, {"device": "abacus"}, "device 'abacus' is not auto, cpu, cuda or cuda:N"),
        (3, {"device": "cuda:x"}, "device"),
        (
            0,
            {"nats_ca": "/nowhere.crt", "nats_url": "tls://h"},
            "nats_ca /nowhere.crt is not a",
        ),
        (0, {"nats_cert": __file__, "nats_url": "tls://h"}, "nats_cert and nats_key must be given"),
        (
            0,
            {"nats_ca": __file__},
            "nats_ca, nats_cert, nats_key and nats_tls_first are for tls://",
        ),
        (0, {"is_nats_tls_first": True}, "nats_ca, nats_cert, nats_key and nats_tls_first are for"),
        (2, {"redis_key": __file__}, "redis_cert and redis_key must be given together"),
        (2, {"http_cert": "/nowhere.crt", "http_key": __file__}, "http_cert /nowhere.crt is not a"),
        (2, {"http_key": __file__}, "http_cert and http_key must be given together"),
        (3, {"data_plane_security": "tls"}, "data_plane_security 'tls' is none of aead, mac, none"),
        (3, {"kv_transport": "rdma"}, "kv_transport 'rdma' is none of own, nixl"),
        (3, {"kv_transport": "nixl"}, "kv_transport nixl does not encrypt: it needs data_plane_"),
        (3, {"load_format": "gguf"}, "load_format 'gguf' is none of auto, dummy"),
        (3, {"activations": "fp8"}, "activations 'fp8' is none of plain, bf16-exchange"),
        (3, {"kv_cache_bytes": 0}, "kv_cache_bytes"),
        (3, {"max_batch_tokens": -1}, "max_batch_tokens"),
        (3, {"gpu_memory": "45 %%"}, "gpu_memory '45 %%' is neither a size such as"),
        (3, {"gpu_memory": "1.2", "device": "cuda"}, "gpu_memory '1.2' is more than all"),
        (3, {"gpu_memory": "45%", "device": "cpu"}, "gpu_memory 45% is for CUDA devices, and"),
        (3, {"max_reserved_share": 0.0}, "max_reserved_share"),
        (3, {"block_size": 0}, "block_size"),
        (0, {"log_level": "loud"}, "log_level 'loud' is none of debug, info, warning, error"),
        (0, {"log_format": "xml"}, "log_format 'xml' is none of auto, json, text"),
    ],
)
def test_error_names_invalid_field(
    tmp_path: Path, index: int, change: dict, message_start: str
) -> None:
    config = msgspec.structs.replace(valid_configs(tmp_path)[index], **change)
    with pytest.raises(ConfigError) as raised:
        check(config)
    assert raised.value.message.startswith(message_start)


@pytest.mark.parametrize(
    ("nats_url", "security", "is_valid"),
    [
        ("nats://u:p@127.0.0.1:4222", "aead", True),
        ("nats://u:p@localhost:4222", "mac", True),
        ("nats://u:p@[::1]:4222", "aead", True),
        ("tls://u:p@nats.example:4222", "aead", True),
        ("nats://u:p@10.0.0.7:4222", "aead", False),
        ("nats://u:p@nats.example:4222", "mac", False),
        ("nats://u:p@nats.example:4222", "none", True),
    ],
)
def test_keys_of_the_data_plane_leave_the_host_with_tls_only(
    tmp_path: Path, nats_url: str, security: str, is_valid: bool
) -> None:
    config = WorkerConfig(
        nats_url=nats_url, process_id="w", model_dir=tmp_path, data_plane_security=security
    )
    if is_valid:
        check(config)
    else:
        with pytest.raises(ConfigError, match=r"nats_url must be tls:// off this host"):
            check(config)


@pytest.mark.parametrize(
    ("nats_host", "listens_on", "advertised", "is_on_loopback"),
    [
        ("127.0.0.1", "127.0.0.1", "", True),
        ("127.0.0.1", "0.0.0.0", "", False),
        ("127.0.0.1", "127.0.0.1", "decode.example", False),
        ("10.0.0.7", "127.0.0.1", "", False),
    ],
)
def test_worker_knows_whether_its_data_plane_leaves_the_host(
    tmp_path: Path, nats_host: str, listens_on: str, advertised: str, is_on_loopback: bool
) -> None:
    config = WorkerConfig(
        nats_url=f"nats://{nats_host}:4222",
        process_id="w",
        model_dir=tmp_path,
        data_plane_host=listens_on,
        data_plane_advertised_host=advertised,
    )
    assert config.is_on_loopback is is_on_loopback


def test_error_names_all_invalid_fields() -> None:
    config = SchedulerConfig(nats_url="x", process_id="", max_queued_requests=0)
    with pytest.raises(ConfigError) as raised:
        check(config)
    assert len(raised.value.message.split("; ")) == 3


@pytest.mark.parametrize(
    ("device", "is_prefill_only", "kv_cache_bytes", "max_batch_tokens", "block_size"),
    [
        ("cpu", False, 256 << 20, 512, 16),
        ("cpu", True, 256 << 20, 512, 16),
        ("cuda", False, None, 2048, 64),  # None: the executor measures the free memory
        ("cuda:1", True, None, 8192, 64),
    ],
)
def test_defaults_depend_on_device(
    tmp_path: Path,
    device: str,
    is_prefill_only: bool,
    kv_cache_bytes: int | None,
    max_batch_tokens: int,
    block_size: int,
) -> None:
    config = WorkerConfig(nats_url=NATS, process_id="w", model_dir=tmp_path)
    assert config.device == "auto"
    found = config.with_defaults_of(device, is_prefill_only=is_prefill_only)
    assert found.device == device
    assert (found.kv_cache_bytes, found.max_batch_tokens) == (kv_cache_bytes, max_batch_tokens)
    assert found.block_size == block_size


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_explicit_values_override_defaults(tmp_path: Path, device: str) -> None:
    given = {"kv_cache_bytes": 5, "max_batch_tokens": 7, "block_size": 32}
    config = WorkerConfig(nats_url=NATS, process_id="w", model_dir=tmp_path, **given)
    found = config.with_defaults_of(device, is_prefill_only=True)
    assert {name: getattr(found, name) for name in given} == given

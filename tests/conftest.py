"""Servers that tests share; each test run and each xdist worker has separate ones."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import settings

from tests.support.grids import thin
from tests.support.servers import NatsServer, RedisServer

# Non-interactive shells start background jobs with SIGINT ignored, which children inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


settings.register_profile("untimed", deadline=None)  # a busy machine fails no test
settings.load_profile("untimed")

# structlog's own console shows the variables of each frame: seconds for one traceback.
structlog.configure(
    processors=[
        *structlog.get_config()["processors"][:-1],
        structlog.dev.ConsoleRenderer(
            colors=False, exception_formatter=structlog.dev.plain_traceback
        ),
    ]
)

# Sorted by CPU seconds, slowest first: a long file that starts last leaves the other process idle.
SLOW_FIRST = (
    "tests/simulation/test_schedules.py",
    "tests/kernels/test_interpreted.py",
    "tests/kernels/test_compiles.py",
    "tests/kernels/cpu",
    "tests/chaos",
    "tests/end_to_end",
    "tests/services/cli/cluster/test_up.py",
    "tests/fuzz",
    "tests/shared/engine",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts slow files to the front; preserves the order within a file. Thins grids."""
    thin(item for item in items if item.get_closest_marker("each_value"))
    root = Path(__file__).parents[1]

    def rank(item: pytest.Item) -> int:
        path = item.path.relative_to(root).as_posix() if item.path.is_relative_to(root) else ""
        return next(
            (index for index, each in enumerate(SLOW_FIRST) if path.startswith(each)),
            len(SLOW_FIRST),
        )

    items.sort(key=rank)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collections of garbage skip the modules of all tests, a million objects: a third of a second
    for each that a test asks for, and as much for some of them while modules are imported.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries report what is left at the end


@pytest.fixture(scope="session", autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Shared weights of a test run are deleted with it; the next run reuses compiled code."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("cache")
        user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        (home / "hearth").mkdir()
        for name in ("kernels", "passed"):  # compiled kernels; tests/kernels/support/passed.py
            reused = user_cache / "hearth" / name
            reused.mkdir(parents=True, exist_ok=True)
            (home / "hearth" / name).symlink_to(reused)
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

"""Servers that tests share; each test run and each xdist worker has separate ones."""

from __future__ import annotations

import atexit
import fcntl
import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, settings

from shared.transport.bus import NatsBus
from tests.support.grids import thin
from tests.support.servers import NatsServer, RedisServer
from tests.support.services.forked_pools import forked_pools
from tests.support.waiting import LIMIT_S

# Non-interactive shells start background jobs with SIGINT ignored, which children inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# By default oneDNN retains the code of 1,024 shapes, 0.35 MB each.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")

SHARED_REDIS: list[RedisServer] = []  # one, while tests use it

# A busy machine fails no test. The short run draws the same examples each time, the long run new
# ones.
UNTIMED: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("short run", **UNTIMED, derandomize=True)
settings.register_profile("long run", **UNTIMED)

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
LAST_COLLECTED = Path(__file__).parent / "wide"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts slow files to the front; preserves the order within a file. Thins grids."""
    thin(item for item in items if item.get_closest_marker("each_value"))
    root = Path(__file__).parents[1]

    @cache
    def rank(path: Path) -> int:
        name = path.relative_to(root).as_posix() if path.is_relative_to(root) else ""
        return next(
            (index for index, each in enumerate(SLOW_FIRST) if name.startswith(each)),
            len(SLOW_FIRST),
        )

    items.sort(key=lambda item: rank(item.path))


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("short run" if config.option.markexpr == "not long" else "long run")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _seed_torch()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    _seed_torch()


def _seed_torch() -> None:
    """Makes random tensors independent of the tests that this process has run before."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collections of garbage skip the modules of all tests, a million objects: a third of a second
    for each that a test asks for, and as much for some of them while modules are imported.
    """
    gc.disable()
    try:
        with _bytecode_written_once():
            return (yield)
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def _bytecode_written_once() -> Iterator[None]:
    """In a fresh clone, the first of several processes collects alone, and so compiles all modules
    for the others, each of which would take the same 12 s.
    """
    if sys.dont_write_bytecode or any(LAST_COLLECTED.rglob("*-pytest-*.pyc")):
        yield
        return
    with Path(__file__).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(file, fcntl.LOCK_SH)
        yield


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends a process of several at once, whose results have been sent: to free the objects of all
    modules one by one takes it 5 s. One that runs alone reports what libraries have left.
    """
    if hasattr(config, "workerinput"):
        atexit._run_exitfuncs()
        os._exit(0)
    gc.unfreeze()


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


@pytest.fixture(scope="session", autouse=True)
def _patient_connections() -> Iterator[None]:
    """On a busy machine a server may not have the core for longer than a process waits for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(NatsBus.connect.__func__.__kwdefaults__, "timeout_s", LIMIT_S)
        yield


@pytest.fixture(scope="session", autouse=True)
def _fork_pools() -> Iterator[None]:
    with forked_pools():
        yield


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    server = RedisServer()
    SHARED_REDIS.append(server)
    yield server
    SHARED_REDIS.clear()
    server.stop()


@pytest.fixture(scope="module", autouse=True)
def logging_left_alone() -> Iterator[None]:
    """Finds the module that configures this process's logging: it fails here, instead of later
    tests, which find nothing in their logs.
    """
    before = structlog.get_config()["logger_factory"]
    yield
    assert structlog.get_config()["logger_factory"] is before, "structlog.configure was called"


@pytest.fixture(scope="module", autouse=True)
def redis_left_empty() -> Iterator[None]:
    """Empties the shared Redis after each module: limits, counts and models that its tests have
    stored would change what the tests of the next one see, in whichever order modules run.
    """
    yield
    for server in SHARED_REDIS:
        server.empty()

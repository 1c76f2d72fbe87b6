"""A real service process: signals, drain, exit status."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from shared.lifecycle.limits import MAX_DESCRIPTORS
from tests.support.waiting import LIMIT_S

CORE = resource.RLIMIT_CORE
SCRIPT = """
import asyncio, resource, sys, time
from shared.background import Background
from shared.config import ProcessConfig
from shared.errors import ConfigError
from shared.lifecycle.process import run_service

class Service:
    def say(self, word):
        print(word, flush=True)
    async def start(self):
        self.say("started")
        if sys.argv[1] == "show limits":
            self.say(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
            self.say(resource.getrlimit(resource.RLIMIT_CORE))
        if sys.argv[1] == "start slowly":
            await asyncio.Event().wait()
        if sys.argv[1] == "refuse":
            raise ConfigError("the port is taken")
        if sys.argv[1] == "break":
            self.background = Background()
            self.background.start_own(self.broken())
    async def broken(self):
        raise RuntimeError("a bug")
    async def drain(self):
        self.say("draining")
        if sys.argv[1] == "hang":
            await asyncio.Event().wait()
    async def stop(self):
        self.say("stopped")

async def build():
    if sys.argv[1] == "load slowly":
        print("loading", flush=True)
        await asyncio.to_thread(time.sleep, 60)
    return Service()

config = ProcessConfig(
    nats_url="nats://h:1", process_id="process-1", drain_timeout_s=float(sys.argv[2])
)
sys.exit(run_service(config, build))
"""


@contextmanager
def process(mode: str, drain_timeout_s: float = 60) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, mode, str(drain_timeout_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def read_line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def wait_for_log(child: subprocess.Popen[str], word: str) -> None:
    assert child.stderr is not None
    while word not in child.stderr.readline():
        assert child.poll() is None


def test_process_may_open_as_many_files_as_the_system_allows() -> None:
    """And dumps no core unless an operator permits it."""
    given, core = (resource.getrlimit(each) for each in (resource.RLIMIT_NOFILE, CORE))
    resource.setrlimit(resource.RLIMIT_NOFILE, (given[1] // 2, given[1]))
    resource.setrlimit(CORE, (core[1], core[1]))
    try:
        with process("show limits") as child:
            assert read_line(child) == "started"
            assert int(read_line(child)) == min(given[1], MAX_DESCRIPTORS)
            assert read_line(child) == str((0, core[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, given)
        resource.setrlimit(CORE, core)


def test_signal_drains_and_stops() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        with process("serve") as child:
            assert read_line(child) == "started"
            wait_for_log(child, '"ready"')
            child.send_signal(number)
            assert [read_line(child), read_line(child)] == ["draining", "stopped"]
            assert child.wait(timeout=LIMIT_S / 2) == 0


def test_signal_during_the_load_ends_the_process_before_it_joins() -> None:
    with process("load slowly") as child:
        assert read_line(child) == "loading"
        child.send_signal(signal.SIGTERM)
        out, _ = child.communicate(timeout=LIMIT_S / 2)  # the load takes a minute
        assert (out, child.returncode) == ("", 0)


def test_signal_during_the_start_stops_what_was_started() -> None:
    with process("start slowly") as child:
        assert read_line(child) == "started"
        child.send_signal(signal.SIGTERM)
        out, _ = child.communicate(timeout=LIMIT_S / 2)
        assert (out.split(), child.returncode) == (["stopped"], 0)


def test_second_signal_aborts_the_drain() -> None:
    with process("hang") as child:
        wait_for_log(child, '"ready"')
        child.send_signal(signal.SIGTERM)
        assert [read_line(child), read_line(child)] == ["started", "draining"]
        child.send_signal(signal.SIGTERM)
        assert child.wait(timeout=LIMIT_S / 2) == 1


def test_failed_start_stops_and_prints_one_line() -> None:
    with process("refuse") as child:
        out, err = child.communicate(timeout=LIMIT_S / 2)
        assert out.split() == ["started", "stopped"]
        assert err == "process-1: the port is taken\n"
        assert child.returncode == 2


def test_failed_background_task_ends_process() -> None:
    with process("break") as child:
        _, err = child.communicate(timeout=LIMIT_S / 2)
        assert child.returncode == 1
        assert "a bug" in err


def test_drain_ends_at_its_timeout() -> None:
    with process("hang", drain_timeout_s=0.2) as child:
        assert read_line(child) == "started"
        child.send_signal(signal.SIGTERM)
        assert read_line(child) == "draining"
        assert read_line(child) == "stopped"
        assert child.wait(LIMIT_S) == 0

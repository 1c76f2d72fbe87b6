"""`hearth up` from start to end, with real servers, services and a small model."""

import asyncio
import io
import json
import os
import re
import signal
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from services.cli.cluster import bench, up
from services.cli.fleet import status
from services.cli.fleet.report import FleetReport
from services.client.chat_request import ChatReply
from services.client.first_answers import describe, first_requests
from services.local.identity import read_key
from services.local.plan import UpOptions
from services.local.state import LocalClusterState, StateDir
from services.worker.worker import build_worker
from shared.clock import MonotonicClock
from shared.config import WorkerConfig
from shared.engine.executors.timing_executor import TimingExecutor
from shared.errors import ConfigError, DependencyUnavailable
from shared.lifecycle.child_process import is_stopped
from shared.subjects import credential_of
from tests.services.cli.cluster.printed_commands import check_printed_commands
from tests.services.cli.cluster.running_up import Up
from tests.services.cli.in_process import call_hearth
from tests.services.local.hub_home import MODEL, offline, write_hub_home
from tests.support.servers import RedisServer, Server, find_binary, free_port
from tests.support.services.running import (
    WAIT_S,
    NoModel,
    add_tenants,
    cluster_of,
    complete,
    environ_for,
    eventually,
    processes_of,
    ready,
    records_of,
    start_hearth,
)
from tests.support.waiting import until


@pytest.fixture(scope="module")
def temporary_dir() -> Iterator[Path]:
    """A directory with a short path, as it will contain sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        yield Path(path)


class SharedUp:
    """One cluster for the tests of this module, and another one after a test that stops it."""

    def __init__(self, start: Callable[[], Up]) -> None:
        self._start = start
        self._up: Up | None = None

    def open(self) -> Up:
        if self._up is None or self._up.process.poll() is not None:
            self._up = self._start()
        return self._up

    def close(self) -> None:
        if self._up is not None and self._up.process.poll() is None:
            self._up.stop()


@pytest.fixture(scope="module")
def shared_up(
    tmp_path_factory: pytest.TempPathFactory, chat_model: Path, temporary_dir: Path
) -> Iterator[SharedUp]:
    """Serves a model by its id on the Hub, from the cache on disk. NATS is on IPv6."""
    home = write_hub_home(tmp_path_factory.mktemp("hf"), chat_model)

    def start() -> Up:
        state_home = tmp_path_factory.mktemp("state")
        options = ("--model", MODEL, "--advertise", "::1")
        return Up(state_home, *options, TMPDIR=str(temporary_dir), **offline(home))

    shared = SharedUp(start)
    yield shared
    shared.close()


@pytest.fixture
def running(shared_up: SharedUp) -> Up:
    """Tests run in any order: pytest-xdist moves them between its processes."""
    return shared_up.open()


def test_up_starts_one_process_per_service(running: Up) -> None:
    lines = list(processes_of(running.state_home).values())
    preparing = [each for each in lines if "preparation_process" in each]
    checking = [each for each in lines if "check_process" in each]
    assert 1 <= len(preparing) <= 3  # the gateway's own, of which only the first is there at once
    assert 1 <= len(checking) <= 3
    encoding = [each for each in lines if "encoding_process" in each]
    assert len(encoding) <= 1  # of its model, which it starts last
    # what long prompts will need, and the loops of the scheduler's costs
    compiling = [each for each in lines if "kernels.cpu" in each or "cost_kernel" in each]
    # a process that is just being forked has the command line of its parent
    others = {*lines} - {*preparing, *checking, *encoding, *compiling}
    services = sorted(each.split("\0")[3] for each in others if "\0services\0" in each)
    assert services == ["decode", "gateway", "kv-index", "prefill", "scheduler", "up"]
    servers = [each for each in others if "\0services\0" not in each]
    names = sorted(Path(each.split("\0")[0].split(" ")[0]).name for each in servers)
    assert names == ["nats-server", "redis-server"], servers
    workers = ready(running.state)["workers"]
    assert workers == {"prefill": ["prefill-1"], "decode": ["decode-1"]}


def test_secrets_are_not_in_command_lines_or_readable_by_others(running: Up) -> None:
    lines = "".join(processes_of(running.state_home).values())
    for credential in running.state.credentials:
        assert credential.password not in lines
    assert running.state.api_key not in lines
    assert stat.S_IMODE(running.directory.stat().st_mode) == 0o700
    for path in running.directory.iterdir():
        if path.suffix in (".conf", ".json"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_printed_commands_work_as_they_are(running: Up) -> None:
    check_printed_commands(running, MODEL, decode_worker="decode-1")


def test_status_shows_all_processes_and_an_operator_sees_the_cluster(running: Up) -> None:
    assert complete(running.state.url, running.state.api_key)["model"] == MODEL
    environ = environ_for(running.state_home)
    table = call_hearth(("status",), environ)  # in a pipe, it looks once
    assert table.returncode == 0, table.stderr
    shown = re.findall(r"^(\S+-1) .* (\S+) *$", table.stdout, re.MULTILINE)
    names = ["prefill-1", "decode-1", "gateway-1", "scheduler-1", "kv_index-1"]
    assert shown == [(name, "ready") for name in names]
    operator = running.state.nats_url_of("operator")
    assert operator is not None

    def shown_json() -> Any:
        seen = call_hearth(("status", "--once", "--json", "--nats-url", operator), environ)
        assert seen.returncode == 0, seen.stderr
        return json_line_of(seen.stdout)

    def is_idle(status: Any) -> bool:
        return status["workers"][1]["generated_per_s"] == 0

    status = eventually(lambda: is_idle(found := shown_json()) and found, "an idle worker")
    of_servers = {
        "servers",
        "gateway_id",
        "unready",
        "recent",
        "rejected",
        "rejected_day",
        "is_sound",
    }
    always = {"workers", "services", *of_servers}
    assert status.keys() == {*always, "roles"}
    prefill, decode = status["workers"]
    assert prefill["num_free_blocks"] == prefill["num_total_blocks"] > 0
    assert 0 <= decode["hit_ratio"] <= 1
    assert decode["model"] == prefill["model"] == MODEL


def test_status_shows_a_frozen_worker_and_a_frozen_redis(running: Up) -> None:
    environ = environ_for(running.state_home) | {"COLUMNS": "80"}
    pids = [running.pid_of("decode"), running.pid_of("redis-server")]
    lost = re.compile(r"^decode-1 .* lost \(silent|gone\) since [\d:]{8}Z *$", re.MULTILINE)
    away = re.compile(r"^redis +unavailable +[\d:]{8}Z *$", re.MULTILINE)

    def seen() -> Any:
        return call_hearth(("status", "--once"), environ)

    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        eventually(
            lambda: (
                (found := seen()).returncode == 1
                and lost.search(found.stdout)
                and away.search(found.stdout)
                and "gateway-1 is not ready: no live decode worker" in found.stdout
            ),
            "a frozen worker and a frozen Redis",
        )
        doctor = call_hearth(("doctor",), environ)
        assert doctor.returncode == 1
        assert re.search(r"fail +processes +decode-1 is lost .* since [\d:]{8}Z", doctor.stdout)
        assert "hearth logs decode-1" in " ".join(doctor.stdout.split())
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    eventually(lambda: seen().returncode == 0, "a sound cluster")
    doctor = call_hearth(("doctor",), environ)
    assert re.search(r"ok +processes +5, none is lost", doctor.stdout), doctor.stdout


def test_models_are_added_and_listed(running: Up) -> None:
    environ = environ_for(running.state_home)
    added = call_hearth(("model", "add", "other", "org/other"), environ)
    try:
        listed = call_hearth(("model", "list"), environ)
    finally:
        call_hearth(("model", "remove", "other"), environ)
    assert (added.returncode, added.stdout) == (0, "r1\n"), added.stderr
    heading, row = listed.stdout.splitlines()[-2:]  # in this process, the bus logs before them
    assert heading.split()[-1] == "pinned"  # without hosts no column for states
    assert row.split()[:2] == ["other", "r1"]


def json_line_of(output: str) -> Any:
    """In this process, the bus logs around it."""
    (line,) = (each for each in output.splitlines() if each.startswith("{"))
    return json.loads(line)


def test_status_repeats_until_interrupted(running: Up, monkeypatch: pytest.MonkeyPatch) -> None:
    num_shown, print_json = 0, status.print_json

    def print_three_times(report: FleetReport) -> None:
        nonlocal num_shown
        print_json(report)
        num_shown += 1
        if num_shown == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(status, "print_json", print_three_times)
    command = ("status", "--json", "--interval-s", "0.1")
    result = call_hearth(command, environ_for(running.state_home))
    assert (result.returncode, num_shown) == (0, 3), result.stderr
    lines = [each for each in result.stdout.splitlines() if each.startswith("{")]
    assert [len(json.loads(each)["workers"]) for each in lines] == [2, 2, 2]


def test_bench_prints_a_table_and_one_json_line(running: Up) -> None:
    loads = ("--concurrency", "1,3", "--requests", "4", "--input-tokens", "60")
    environ = environ_for(running.state_home) | {"COLUMNS": "80"}
    result = call_hearth(("bench", *loads, "--output-tokens", "3"), environ)
    assert result.returncode == 0, result.stderr
    table, line = result.stdout.rstrip("\n").rsplit("\n", 1)
    assert table.split()[0] == "load" and max(map(len, table.splitlines())) <= 80
    assert all(name in table for name in bench.COLUMNS)
    report = json.loads(line)
    assert [row["load"] for row in report["rows"]] == ["closed 1", "closed 3"]
    for row in report["rows"]:
        assert (row["num_requests"], row["num_errors"], row["output_tokens"]) == (4, 0, 3)
        assert abs(row["prompt_tokens"] - 60) < 15


def test_worker_joins_with_a_new_credential_and_leaves(running: Up, chat_model: Path) -> None:
    environ = environ_for(running.state_home)
    added = call_hearth(("credential", "worker", "--process-id", "far"), environ)
    assert "listens on loopback only" in added.stderr
    config = WorkerConfig(
        nats_url=added.stdout.strip(),
        process_id="far",
        model_dir=chat_model,
        model_name=MODEL,
        device="cpu",
    )
    asyncio.run(join_and_leave(running, config))


class FarExecutor(TimingExecutor):
    """Of another revision than the cluster's."""

    revision = "far"
    eos_token_ids = ()
    has_head = True


async def join_and_leave(up: Up, config: WorkerConfig) -> None:
    def is_known() -> bool:
        return "far" in map(credential_of, ready(up.state)["workers"]["decode"])

    def load(config: WorkerConfig) -> FarExecutor:
        return FarExecutor(MonotonicClock(), num_blocks=64, vocab_size=400)

    worker = await build_worker(config, ("prefill", "decode"), load)
    await worker.start()
    try:
        await until(is_known)
        await worker.drain()
    finally:
        await worker.stop()
    await until(lambda: not is_known())


class RunningCluster:
    """Stands for the cluster that `hearth up` would start."""

    observer = None
    model_name = MODEL
    http_cert = ""

    def __init__(self, state: LocalClusterState) -> None:
        self.url, self.api_key = state.url, state.api_key
        self.is_stopped = False

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, *_: object) -> None:
        self.is_stopped = True


def test_check_asks_its_questions_and_stops(
    running: Up, chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = RunningCluster(running.state)
    monkeypatch.setattr(up, "LocalCluster", lambda *_, **__: cluster)
    monkeypatch.setattr(up, "replace_standard_streams", lambda: None)
    command = ("up", "--check", "--model", str(chat_model))
    checked = call_hearth(command, environ_for(running.state_home))
    assert checked.returncode == 0 and cluster.is_stopped, checked.stderr
    assert re.search(r"cached \d+ of \d+ prompt tokens .* decode decode-1", checked.stdout)
    assert checked.stdout.endswith(f"{running.state.url}/v1\nstopping …\nstopped\n")


def test_killed_nats_is_restarted_and_the_cluster_answers(running: Up) -> None:
    kill_and_wait(running, "nats-server")


def test_killed_redis_is_restarted_with_all_tenants_and_their_usage(running: Up) -> None:
    """A key that no gateway has seen is valid afterwards, too."""
    tenants = {"acme": {"requests_per_min": 50}, "other": {"concurrency": 9}}
    keys = {name: f"key-of-{name}" for name in tenants}
    asyncio.run(add_tenants(running.state.redis_url, tenants, keys))
    assert complete(running.state.url, keys["acme"])["usage"]["completion_tokens"] == 8

    def records() -> object:
        return asyncio.run(records_of(running.state.redis_url, ("acme", "other")))

    def is_counted() -> bool:
        return "requests=1, input" in str(records())

    eventually(is_counted, "usage of a request")
    before = records()
    kill_and_wait(running, "redis-server")
    assert records() == before
    assert complete(running.state.url, keys["other"])["usage"]["completion_tokens"] == 8


def kill_and_wait(running: Up, command: str) -> None:
    pid = running.pid_of(command)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: set(running.pids_of(command)) - {pid}, f"new {command}")
    eventually(lambda: answers(running.state), "answer")
    shown = call_hearth(("status", "--once"), environ_for(running.state_home))
    assert "restarted within the last hour: " in shown.stdout
    logged = call_hearth(("logs", "up"), environ_for(running.state_home))
    assert "was killed (SIGKILL)" in logged.stdout, logged.stderr


def answers(state: LocalClusterState) -> bool:
    try:
        return complete(state.url, state.api_key)["usage"]["completion_tokens"] == 8
    except (OSError, NoModel):
        return False


def fault(state: LocalClusterState, body: object, **headers: str) -> int:
    """Sends a fault with the operator's token, and returns the status."""
    given = {"authorization": f"Bearer {state.operator_token}"} | headers
    return httpx.post(f"{state.url}/v1/cluster/faults", json=body, headers=given).status_code


def test_operator_kills_and_freezes_workers_of_this_cluster(running: Up) -> None:
    state = running.state
    kill, freeze = ({"worker_id": "decode-1", "fault": each} for each in ("kill", "freeze"))
    for token in ("", "Bearer", "Bearer x", f"Bearer {state.api_key}"):
        assert fault(state, kill, authorization=token) == 401
    assert fault(state, kill, host="evil.example") == 404
    for body in ({}, [], kill | {"fault": "stop"}, kill | {"worker_id": "gateway-1"}):
        assert fault(state, body) == 400, body
    before = running.pid_of("decode")
    assert fault(state, freeze) == 200
    eventually(lambda: is_stopped(before), "frozen worker")
    assert fault(state, freeze) == 400
    assert fault(state, kill) == 200
    eventually(lambda: set(running.pids_of("decode")) - {before}, "new worker")
    eventually(lambda: answers(state), "answer")


def test_worker_is_restarted_and_sigterm_leaves_nothing(running: Up, temporary_dir: Path) -> None:
    """Neither processes nor files, not even those of the worker that was killed."""
    kill_and_wait(running, "decode")
    assert list(temporary_dir.rglob("kv.sock"))
    output = running.stop()
    assert running.process.returncode == 0, output
    assert "decode-1 was killed (SIGKILL)\n" in output
    assert "decode-1 is started again" in output
    assert "What is Hearth?" in output
    assert f"curl -N {running.state.url}/v1/chat/completions" in output
    assert f"curl -N {running.state.url}/client/v4/accounts/default/ai/run/" in output
    assert "-m services.client.example_chat 'nats://client-1:" in output
    assert processes_of(running.state_home) == {}
    assert not running.directory.exists()
    assert list(temporary_dir.iterdir()) == []


def test_time_between_tokens_that_came_at_once_is_left_out() -> None:
    reply = partial(ChatReply, text="", ttft_s=0.1, usage={}, hearth={"decode_worker": "d"})
    assert describe(reply(itl_s=(0.0, 0.00001))).startswith("first token 100.0 ms · cached 0")
    assert "ms · between tokens 2.0 ms (median) · " in describe(reply(itl_s=(0.002,)))


async def test_start_that_is_refused_shows_the_cursor_again(
    tmp_path: Path, chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = io.StringIO()
    terminal = Console(file=shown, force_terminal=True)
    monkeypatch.setattr(up, "text_console", lambda: terminal)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = UpOptions(model_dir=chat_model, http_port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match="Address already in use"):
            await up._up(options, is_check=False)
    assert shown.getvalue().count("\x1b[?25l") == shown.getvalue().count("\x1b[?25h") == 1


async def test_failed_first_request_is_an_error_only_with_check() -> None:
    url = f"http://127.0.0.1:{free_port()}"  # no server listens on this port
    console = Console(file=io.StringIO(), width=200)
    request_answers = partial(first_requests, url, "key", console, MonotonicClock(), observer=None)
    await request_answers(is_check=False)
    assert f"no answer: cannot reach {url}" in console.file.getvalue()
    with pytest.raises(DependencyUnavailable):
        await request_answers(is_check=True)


@pytest.fixture
def open_nats() -> Iterator[Server]:
    """An external nats-server without credentials."""
    port = free_port()
    server = Server([find_binary("nats-server"), "-a", "127.0.0.1", "-p", str(port)], port)
    yield server
    server.stop()


def test_children_of_a_killed_up_end_and_external_servers_go_on(
    tmp_path: Path, chat_model: Path, open_nats: Server, redis_server: RedisServer
) -> None:
    """HTTP is on IPv6, and the path of the temporary directory is too long for sockets."""
    temporary = tmp_path / ("x" * 80)
    temporary.mkdir()
    cluster = Up(
        tmp_path,
        "--model",
        str(chat_model),
        "--role",
        "both",
        "--http",
        "[::1]:0",
        "--redis",
        redis_server.url,
        "--nats",
        f"nats://127.0.0.1:{open_nats.port}",
        TMPDIR=str(temporary),
    )
    assert cluster.state.url.startswith("http://[::1]:")
    kill = {"worker_id": "decode-1", "fault": "kill"}
    assert fault(cluster.state, kill) == 404  # its NATS may have other clusters' workers
    assert complete(cluster.state.url, cluster.state.api_key)["usage"]["completion_tokens"] == 8
    ((prefill,), (decode,)) = ready(cluster.state)["workers"].values()
    assert prefill == decode and re.fullmatch(r"worker-\w{12}", decode)
    (kept_key,) = (tmp_path / "hearth" / "keys").iterdir()  # the next start takes the same one
    assert read_key(kept_key) == cluster.state.api_key
    assert stat.S_IMODE(kept_key.stat().st_mode) == 0o600
    directory, _ = cluster_of(tmp_path) or pytest.fail("the cluster is not running")
    scratch = (directory / "tmp").resolve()
    output = cluster.stop(signal.SIGKILL)
    assert "worker-" in output and "redis ready" not in output and "nats ready" not in output
    eventually(lambda: not processes_of(tmp_path), "end of the children")
    for server in (open_nats, redis_server):
        os.kill(server.pid, 0)
    assert list(scratch.rglob("kv.sock"))
    StateDir.create(directory.parent).close(retain_logs=False)  # as the next `hearth up` does
    assert not scratch.exists()


def test_up_fails_with_the_error_of_a_worker(tmp_path: Path, chat_model: Path) -> None:
    port = free_port()
    options = ("--model", str(chat_model), "--role", "both", "--http", f"127.0.0.1:{port}")
    process = start_hearth(tmp_path, "up", *options, HEARTH_MAX_SEQUENCES="0")
    output, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 2
    failure = output.strip().splitlines()[-1]
    assert re.fullmatch(
        r"hearth: worker-1 ended during startup \(exit status 2: .*max_sequences.*\); its log: .*",
        failure,
    )
    assert Path(failure.rpartition("its log: ")[2]).is_file()
    # those of a gateway that has been killed end with their input
    eventually(lambda: not processes_of(tmp_path), "end of all processes")

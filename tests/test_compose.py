"""docker-compose.yml without Docker: each service runs the exact command of the file."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import redis
import yaml

from services.client.probe import is_alive
from services.local.state import LocalClusterState
from shared.config import GatewayConfig
from shared.lifecycle.release import installed_release
from shared.subjects import credential_of
from tests.services.cli.cluster.chat_checkpoint import write_chat_checkpoint
from tests.services.cli.in_process import call_hearth
from tests.support.cluster.process_template import ForkedProcess, template
from tests.support.cluster.service_processes import process_environ
from tests.support.servers import Server, find_binary, free_port
from tests.support.services.running import NoModel, complete, eventually, ready

ROOT = Path(__file__).parents[1]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
HEARTH_SERVICES = ("kv_index", "scheduler", "prefill", "decode", "gateway")
OPERATOR_TOKEN = "operator-token"
SECRETS = {
    name: f"p{index}"
    for index, name in enumerate(sorted(set(re.findall(r"HEARTH_\w+_PASSWORD", str(COMPOSE)))))
}
SECRETS["HEARTH_OPERATOR_TOKEN"] = OPERATOR_TOKEN


def interpolated(text: str) -> str:
    """Interpolates as compose does: ${NAME}, ${NAME:-default}, ${NAME:?message}; $$ is a dollar."""

    def value(match: re.Match[str]) -> str:
        name, _, default = match[1].partition(":")
        return SECRETS.get(name) or default.removeprefix("-")

    return re.sub(r"\$\{([^}]*)\}", value, text).replace("$$", "$")


def environment(service: str) -> dict[str, str]:
    return {name: interpolated(text) for name, text in SERVICES[service]["environment"].items()}


def plain_environ() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if not name.startswith("HEARTH_")}


class ComposedServer(Server):
    """A server with the environment variables of the compose file."""

    def __init__(self, command: list[str], port: int, environ: dict[str, str]) -> None:
        assignments = [f"{name}={text}" for name, text in environ.items()]
        super().__init__(["env", *assignments, *command], port)


class Stack:
    """The five services on this host; container names become 127.0.0.1 and a port."""

    def __init__(self, directory: Path) -> None:
        self.logs = directory
        self.model_dir = write_chat_checkpoint(directory / "model")
        self.ports = {"nats:4222": free_port(), "redis:6379": free_port(), "0.0.0.0": free_port()}
        self.metrics_ports: dict[str, int] = {}
        self.servers = [self._nats(), self._redis()]
        self.processes = {service: self.start(service) for service in HEARTH_SERVICES}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports['0.0.0.0']}"

    @property
    def redis_url(self) -> str:
        return self.local(environment("gateway")["HEARTH_REDIS_URL"])

    def probe(self, service: str, path: str) -> httpx.Response:
        url = f"http://127.0.0.1:{self.metrics_ports[service]}{path}"
        return httpx.get(url, trust_env=False, timeout=5)

    def stop(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.wait(timeout=30)
        for server in self.servers:
            server.stop()

    @property
    def state(self) -> LocalClusterState:
        return LocalClusterState(url=self.url, api_key="", operator_token=OPERATOR_TOKEN)

    def _nats(self) -> Server:
        (mount,) = SERVICES["nats"]["volumes"]
        source, target, _ = mount.split(":")
        flag, path = SERVICES["nats"]["command"]
        assert (flag, path) == ("-c", target)
        command = [find_binary("nats-server"), "-c", str(ROOT / source), "-a", "127.0.0.1"]
        port = self.ports["nats:4222"]
        return ComposedServer([*command, "-p", str(port)], port, environment("nats"))

    def _redis(self) -> Server:
        shell, flag, line = SERVICES["redis"]["command"]
        port = self.ports["redis:6379"]
        line = interpolated(line).replace("redis-server", find_binary("redis-server"))
        line += f" --bind 127.0.0.1 --port {port} --dir {self.logs}"
        return ComposedServer([shell, flag, line], port, environment("redis"))

    def start(self, service: str) -> ForkedProcess:
        command = [self.local(word) for word in SERVICES[service]["command"]]
        environ = self.local_environment(service)
        if service == "scheduler":  # otherwise decode workers compute these short prompts
            environ["HEARTH_MAX_LOCAL_PREFILL_TOKENS"] = "4"
        if service == "gateway":
            environ["HEARTH_LAME_DUCK_S"] = "0"  # no balancer polls it here
        return template().start(
            [str(self.logs), *command], process_environ(environ), self.logs / f"{service}.log"
        )

    def local(self, text: str) -> str:
        for name in ("nats:4222", "redis:6379"):
            text = text.replace(f"@{name}", f"@127.0.0.1:{self.ports[name]}")
        fixed = {"0.0.0.0": "127.0.0.1", "8000": str(self.ports["0.0.0.0"])}
        fixed |= {"/model": str(self.model_dir)}
        return fixed.get(text, text)

    def local_environment(self, service: str) -> dict[str, str]:
        """Here all services run on one host, which may not resolve its own name."""
        environ = {name: self.local(text) for name, text in environment(service).items()}
        assert environ["HEARTH_METRICS_PORT"] == "9464"
        environ["HEARTH_METRICS_PORT"] = str(self.metrics_ports.setdefault(service, free_port()))
        if environ.get("HEARTH_DATA_PLANE_HOST") == "0.0.0.0":
            environ["HEARTH_DATA_PLANE_ADVERTISED_HOST"] = "127.0.0.1"
        return environ


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    started = Stack(tmp_path_factory.mktemp("compose"))
    yield started
    started.stop()


def answers(url: str, api_key: str) -> dict[str, Any] | None:
    try:
        return complete(url, api_key)
    except (OSError, NoModel):
        return None


def test_five_services_become_ready_and_answer(stack: Stack) -> None:
    eventually(lambda: ready(stack.state), f"ready; logs in {stack.logs}")
    workers = eventually(
        lambda: all((found := ready(stack.state).get("workers", {})).values()) and found, "workers"
    )
    assert {role: list(map(credential_of, ids)) for role, ids in workers.items()} == {
        "prefill": ["prefill"],
        "decode": ["decode"],
    }
    key = api_key(stack)
    answer = eventually(lambda: answers(stack.url, key), "an answer")
    assert answer["hearth"]["decode_worker"] == workers["decode"][0]
    assert answer["hearth"]["prefill_worker"] == workers["prefill"][0]


def api_key(stack: Stack) -> str:
    environ = {**plain_environ(), "HEARTH_REDIS_URL": stack.redis_url}
    done = call_hearth(("api-key", "default"), environ)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_replica_replaces_a_service_without_a_lost_request(stack: Stack) -> None:
    """As `--scale decode=2`, then a stop of the older one, under load."""
    key, is_over, num_answers, failures = api_key(stack), threading.Event(), [], []

    def num_decode_workers() -> int:
        return len(ready(stack.state).get("workers", {}).get("decode", []))

    def load() -> None:
        while not is_over.is_set():
            try:
                num_answers.append(complete(stack.url, key))
            except (OSError, NoModel) as error:
                failures.append(repr(error))

    eventually(lambda: answers(stack.url, key), "an answer")
    del stack.metrics_ports["decode"]  # in its own container each has port 9464
    replica = stack.start("decode")
    eventually(lambda: num_decode_workers() == 2, "two decode workers")
    thread = threading.Thread(target=load)
    thread.start()
    try:
        stack.processes["decode"].terminate()
        assert stack.processes["decode"].wait(timeout=30) == 0
        num_before = len(num_answers)
        eventually(lambda: len(num_answers) > num_before + 3, "answers of the replica")
    finally:
        is_over.set()
        thread.join()
        stack.processes["decode"] = replica
    assert failures == []
    eventually(lambda: num_decode_workers() == 1, "one decode worker")


def test_redis_has_a_memory_limit_and_evicts_no_key(stack: Stack) -> None:
    with redis.Redis.from_url(stack.redis_url) as client:
        found = client.config_get("maxmemory*")
    assert (found["maxmemory"], found["maxmemory-policy"]) == (str(1 << 30), "noeviction")


@pytest.mark.parametrize("service", HEARTH_SERVICES)
def test_health_check_succeeds_for_a_running_service(stack: Stack, service: str) -> None:
    url = environment(service)["HEARTH_NATS_URL"]
    eventually(lambda: health(stack, url) == 0, "a heartbeat; the stack may just have started")


@pytest.mark.parametrize("service", HEARTH_SERVICES)
def test_running_service_answers_its_probes(stack: Stack, service: str) -> None:
    eventually(lambda: ready(stack.state), f"ready; logs in {stack.logs}")
    for path, text in (("/healthz", "ok\n"), ("/ready", "ready\n")):
        eventually(lambda path=path, text=text: stack.probe(service, path).text == text, path)
    metrics = stack.probe(service, "/metrics").text
    assert f'hearth_process_ready{{process="{service.replace("_", "-")}.' in metrics
    assert f'release="{installed_release()}"' in metrics
    assert ("hearth_loaded_models" in metrics) == (service == "gateway")


def test_frozen_worker_is_not_live_in_the_metrics_of_the_gateway(stack: Stack) -> None:
    """Its own port, on a frozen thread, does not answer, so its probes fail too."""

    def is_live(value: float) -> bool:
        metrics = httpx.get(f"{stack.url}/metrics", trust_env=False).text
        line = rf'hearth_process_live{{process="decode\.\w+",role="decode"}} {value}'
        return re.search(line, metrics) is not None

    eventually(lambda: ready(stack.state), f"ready; logs in {stack.logs}")
    eventually(lambda: is_live(1.0), "a live worker")
    stack.processes["decode"].send_signal(signal.SIGSTOP)
    try:
        eventually(lambda: is_live(0.0), "a lost worker")
    finally:
        stack.processes["decode"].send_signal(signal.SIGCONT)
    eventually(lambda: is_live(1.0), "the worker again")


@pytest.mark.parametrize("service", HEARTH_SERVICES)
def test_health_check_of_the_image_asks_the_process_itself(stack: Stack, service: str) -> None:
    dockerfile = (ROOT / "services" / "Dockerfile").read_text()
    assert 'CMD ["hearth", "health"]' in dockerfile
    environ = stack.local_environment(service)
    assert is_alive({**environ, "HEARTH_METRICS_HOST": environment(service)["HEARTH_METRICS_HOST"]})
    assert is_alive({**environ, "HEARTH_METRICS_PORT": str(free_port())}) is False


def test_observer_and_operator_may_use_their_commands(stack: Stack) -> None:
    for service, arguments in (
        ("observer", ("status", "--once")),
        ("operator", ("role", "x", "decode")),
    ):
        environ = {
            **plain_environ(),
            "HEARTH_NATS_URL": stack.local(environment(service)["HEARTH_NATS_URL"]),
        }
        done = call_hearth(arguments, environ)
        assert "decode" in done.stdout if service == "observer" else "x" in done.stderr, done
        assert "permission" not in done.stderr.lower()


def test_each_profile_has_workers_of_its_own() -> None:
    profiles = {name: each.get("profiles") for name, each in SERVICES.items()}
    assert profiles["prefill"] == profiles["decode"] == ["cpu"]
    assert profiles["prefill-gpu"] == profiles["decode-gpu"] == ["gpu"]
    assert {name for name, each in profiles.items() if each is None} == {
        *("nats", "redis", "kv_index", "scheduler", "gateway"),
    }


def test_traces_reach_the_store() -> None:
    collector = yaml.safe_load((ROOT / "services" / "deploy" / "collector.yml").read_text())
    assert collector["exporters"]["otlp"]["endpoint"].partition(":")[0] in SERVICES
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in SERVICES["gateway"]["environment"]
    assert ".[tracing]" in (ROOT / "services" / "Dockerfile").read_text()


def test_health_check_fails_for_an_absent_service(stack: Stack) -> None:
    absent = f"nats://decode-gpu:{SECRETS['HEARTH_DECODE_GPU_PASSWORD']}@nats:4222"
    assert health(stack, absent, timeout_s=0.4) == 1


def health(stack: Stack, nats_url: str, *, timeout_s: float = 1.5) -> int:
    """The exit status of the command over NATS."""
    environ = {**plain_environ(), "HEARTH_NATS_URL": stack.local(nats_url)}
    return call_hearth(("health", "--timeout-s", str(timeout_s)), environ).returncode


def test_grace_period_covers_lame_duck_drain_and_stop() -> None:
    defaults = {each.name: each.default for each in msgspec.structs.fields(GatewayConfig)}
    leave_s = defaults["lame_duck_s"] + defaults["drain_timeout_s"]
    for service in HEARTH_SERVICES:
        assert float(SERVICES[service]["stop_grace_period"].removesuffix("s")) >= leave_s + 10


def test_permissions_of_nats_are_those_of_this_release() -> None:
    shipped = (ROOT / "services/deploy/nats.conf").read_text()
    command = shipped.partition("\n")[0].removeprefix("# hearth ")
    assert call_hearth(tuple(command.split()), plain_environ()).stdout == shipped


def test_every_service_has_its_own_credential() -> None:
    users = [
        re.search(r"nats://([\w-]+):\$\{(\w+)\}@", service["environment"]["HEARTH_NATS_URL"])
        for service in SERVICES.values()
        if "HEARTH_NATS_URL" in service.get("environment", {})
    ]
    names = [match[1] for match in users if match is not None]
    assert len(names) == len(set(names)) == len(users) == 9
    for match in users:
        assert match is not None
        variable = f"HEARTH_{match[1].upper().replace('-', '_')}_PASSWORD"
        assert match[2] == variable
        assert variable in SERVICES["nats"]["environment"]
    text = (ROOT / "services" / "deploy" / "nats.conf").read_text()
    assert set(re.findall(r'user: "([\w-]+)"', text)) == set(names)


def test_secrets_have_no_default_and_only_gateway_and_grafana_are_published() -> None:
    for name in SECRETS:
        assert f"${{{name}:-" not in (ROOT / "docker-compose.yml").read_text()
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert published == {
        "gateway": ["${HEARTH_HTTP:-127.0.0.1:8000}:8000"],
        "grafana": ["${HEARTH_GRAFANA:-127.0.0.1:3000}:3000"],
        "jaeger": ["${HEARTH_JAEGER:-127.0.0.1:16686}:16686"],
    }

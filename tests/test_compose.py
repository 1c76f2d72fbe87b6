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

from services.cli.deployment.secret_folder import PROCESSES
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
REDIS_CONF = ROOT / "services/deploy/redis.conf"
PROMETHEUS = ROOT / "services/deploy/prometheus.yml"
HEARTH_SERVICES = ("kv_index", "scheduler", "prefill", "decode", "gateway")
SECRETS = "/run/secrets"


def interpolated(text: str) -> str:
    """Interpolates as compose does without any variable set: ${NAME:-default}."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def environment(service: str) -> dict[str, str]:
    return {name: interpolated(text) for name, text in SERVICES[service]["environment"].items()}


def plain_environ() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if not name.startswith("HEARTH_")}


class Stack:
    """The five services on this host; container names become 127.0.0.1 and a port."""

    def __init__(self, directory: Path) -> None:
        self.logs = directory
        self.model_dir = write_chat_checkpoint(directory / "model")
        self.ports = {"nats:4222": free_port(), "redis:6379": free_port(), "0.0.0.0": free_port()}
        self.secrets = self._make_secrets()
        self.metrics_ports: dict[str, int] = {}
        self.servers = [self._nats(), self._redis()]
        self.processes = {service: self.start(service) for service in HEARTH_SERVICES}

    def _make_secrets(self) -> Path:
        folder, redis_host = self.logs / "secrets", f"127.0.0.1:{self.ports['redis:6379']}"
        arguments = ("credential", "--folder", str(folder), "--host", redis_host)
        done = call_hearth(arguments, plain_environ())
        assert done.returncode == 0, done.stderr
        return folder

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports['0.0.0.0']}"

    def redis_url(self, role: str) -> str:
        return (self.secrets / f"redis-{role}.url").read_text().strip()

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
        token = (self.secrets / "operator-token").read_text().strip()
        return LocalClusterState(url=self.url, api_key="", operator_token=token)

    def _nats(self) -> Server:
        flag, path = SERVICES["nats"]["command"]
        assert (flag, path) == ("-c", f"{SECRETS}/nats.conf")
        port = self.ports["nats:4222"]
        command = [find_binary("nats-server"), flag, self.local(path), "-a", "127.0.0.1"]
        return Server([*command, "-p", str(port)], port)

    def _redis(self) -> Server:
        program, path = SERVICES["redis"]["command"]
        mounted = {each.split(":")[1]: each.split(":")[0] for each in SERVICES["redis"]["volumes"]}
        port = self.ports["redis:6379"]
        command = [find_binary(program), str(ROOT / mounted[path]), "--bind", "127.0.0.1"]
        command += ["--port", str(port), "--dir", str(self.logs)]
        return Server([*command, "--aclfile", str(self.secrets / "users.acl")], port)

    def start(self, service: str) -> ForkedProcess:
        command = [self.local(interpolated(each)) for each in SERVICES[service]["command"]]
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
        text = text.replace(SECRETS, str(self.secrets))
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
    environ = {**plain_environ(), "HEARTH_REDIS_URL": stack.redis_url("operator")}
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
    password = (stack.secrets / "redis-admin.password").read_text().strip()
    port = stack.ports["redis:6379"]
    with redis.Redis(port=port, password=password) as client:
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
        token = (stack.secrets / "metrics-token").read_text().strip()
        headers = {"Authorization": f"Bearer {token}"}
        metrics = httpx.get(f"{stack.url}/metrics", headers=headers, trust_env=False).text
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


def test_operator_keeps_its_list_in_a_volume_that_it_may_write() -> None:
    """A volume of Docker has the owner of the folder in the image; its container is removed."""
    (volume,) = SERVICES["operator"]["volumes"]
    source, _, folder = interpolated(volume).partition(":")
    assert source in COMPOSE["volumes"]
    assert Path(environment("operator")["HEARTH_RETRACTIONS"]).parent == Path(folder)
    dockerfile = (ROOT / "services" / "Dockerfile").read_text()
    (owned,) = re.findall(r"install --directory --owner hearth (.*)", dockerfile)
    mounted = {
        target
        for service in SERVICES.values()
        for each in service.get("volumes", ())
        if str(service.get("image")).startswith("hearth:")
        for source, target, *mode in [interpolated(each).split(":")]
        if source in COMPOSE["volumes"] and mode != ["ro"]
    }
    assert mounted == set(owned.split())


def test_each_profile_has_workers_of_its_own() -> None:
    profiles = {name: each.get("profiles") for name, each in SERVICES.items()}
    assert profiles["prefill"] == profiles["decode"] == ["cpu"]
    assert profiles["prefill-gpu"] == profiles["decode-gpu"] == ["gpu"]
    assert profiles["encode"] == ["encode"]
    assert {name for name, each in profiles.items() if each is None} == {
        *("nats", "redis", "kv_index", "scheduler", "gateway"),
    }


def test_traces_reach_the_store() -> None:
    collector = yaml.safe_load((ROOT / "services" / "deploy" / "collector.yml").read_text())
    assert collector["exporters"]["otlp"]["endpoint"].partition(":")[0] in SERVICES
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in SERVICES["gateway"]["environment"]
    assert ".[tracing]" in (ROOT / "services" / "Dockerfile").read_text()


def test_health_check_fails_for_an_absent_service(stack: Stack) -> None:
    absent = environment("decode-gpu")["HEARTH_NATS_URL"]
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


def test_every_process_has_its_own_credential() -> None:
    urls = {
        name: each["environment"]["HEARTH_NATS_URL"]
        for name, each in SERVICES.items()
        if "HEARTH_NATS_URL" in each.get("environment", {})
    }
    assert len(urls) == 10
    for service, url in urls.items():
        name = service.replace("_", "-")
        assert url == f"nats://{name}@nats:4222?seed={SECRETS}/{name}.nk"
        assert f"{name}.nk" in SERVICES[service]["secrets"]
        assert any(each.endswith(f"={name}") for each in PROCESSES)


def test_both_ends_of_the_data_plane_have_one_security() -> None:
    """A gateway that demands keys sends no pixels to workers without."""
    ends = [
        each for each in SERVICES if each.startswith(("gateway", "prefill", "decode", "encode"))
    ]
    assert len(ends) == 6
    found = {environment(each).get("HEARTH_DATA_PLANE_SECURITY") for each in ends}
    assert found == {"none"}


def test_prometheus_reads_every_process() -> None:
    (job,) = (
        each
        for each in yaml.safe_load(PROMETHEUS.read_text())["scrape_configs"]
        if each["job_name"] == "hearth-process"
    )
    ((names, port),) = [(each["names"], each["port"]) for each in job["dns_sd_configs"]]
    ports = {
        name: each["environment"]["HEARTH_METRICS_PORT"]
        for name, each in SERVICES.items()
        if "HEARTH_METRICS_PORT" in each.get("environment", {})
    }
    assert ports == dict.fromkeys(names, f"{port}")


def test_secrets_are_files_of_those_that_read_them(stack: Stack) -> None:
    for name, service in SERVICES.items():
        values = [*service.get("environment", {}).values(), *map(str, service.get("command", ()))]
        used = {each for text in values for each in re.findall(rf"{SECRETS}/([\w.-]+)", text)}
        if name == "redis":
            used |= set(re.findall(rf"{SECRETS}/([\w.-]+)", REDIS_CONF.read_text()))
        if name == "prometheus":
            used |= set(re.findall(rf"{SECRETS}/([\w.-]+)", PROMETHEUS.read_text()))
        assert set(service.get("secrets", ())) == used, name
        assert not [each for each in values if re.search(r"PASSWORD|TOKEN\}|SECRET\}", each)]
    assert {each.name for each in stack.secrets.iterdir()} >= COMPOSE["secrets"].keys()
    assert stack.secrets.stat().st_mode & 0o777 == 0o700


def test_containers_have_no_privileges() -> None:
    for name, service in SERVICES.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["read_only"] is True
    assert SERVICES["redis"]["user"] == "redis"


def test_each_gpu_worker_has_a_device_of_its_own() -> None:
    devices = {
        name: each["deploy"]["resources"]["reservations"]["devices"]
        for name, each in SERVICES.items()
        if "deploy" in each
    }
    ids = {
        name: [interpolated(i) for d in each for i in d["device_ids"]]
        for name, each in devices.items()
    }
    assert ids == {"prefill-gpu": ["0"], "decode-gpu": ["1"]}


def test_only_gateway_and_boards_are_published() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert published == {
        "gateway": ["${HEARTH_HTTP:-127.0.0.1:8000}:8000"],
        "grafana": ["${HEARTH_GRAFANA:-127.0.0.1:3000}:3000"],
        "jaeger": ["${HEARTH_JAEGER:-127.0.0.1:16686}:16686"],
    }

"""`hearth credential --folder` and `--kubernetes`."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest
import yaml

from services.cli.deployment import folder_record
from services.cli.deployment.secret_folder import FILES_OF_ROLE, HUB_TOKEN, PROCESSES
from services.local.credentials import named_credentials
from shared.transport.nkeys import UserKey
from tests.services.cli.in_process import call_hearth


def make(folder: Path, *arguments: str) -> str:
    done = call_hearth(("credential", "--folder", str(folder), *arguments), {})
    assert done.returncode == 0, done.stderr
    return done.stdout


def texts(folder: Path) -> dict[str, str]:
    return {each.name: each.read_text() for each in folder.iterdir()}


def test_every_process_has_a_key_that_nats_knows(tmp_path: Path) -> None:
    make(tmp_path)
    config = (tmp_path / "nats.conf").read_text()
    for each in named_credentials(PROCESSES):
        key = UserKey.of_file(tmp_path / f"{each.process_id}.nk")
        assert key.public in config
        assert key.seed not in config


def test_folder_that_others_may_enter_gets_no_secret(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    done = call_hearth(("credential", "--folder", str(tmp_path)), {})
    assert (done.returncode, texts(tmp_path)) == (2, {})
    assert f"chmod 700 {tmp_path}" in done.stderr
    tmp_path.chmod(0o750)  # a group that the operator has chosen
    make(tmp_path)


def test_redis_has_digests_of_the_passwords(tmp_path: Path) -> None:
    make(tmp_path, "--host", "redis.internal:6380")
    users = (tmp_path / "users.acl").read_text()
    password = (tmp_path / "redis-gateway.password").read_text().strip()
    assert f"user gateway reset on #{sha256(password.encode()).hexdigest()} " in users
    assert password not in users
    url = (tmp_path / "redis-gateway.url").read_text()
    assert url == f"redis://gateway:{password}@redis.internal:6380/0\n"


def test_second_call_adds_and_changes_nothing(tmp_path: Path) -> None:
    make(tmp_path, "--process", "decode=decode-1")
    (tmp_path / HUB_TOKEN).write_text("hf_mine\n")
    before = texts(tmp_path)
    make(tmp_path, "--process", "decode=decode-2@eu")
    after = texts(tmp_path)
    assert after.keys() - before.keys() == {"decode-2.nk"}
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"nats.conf", folder_record.FILE}
    for name in ("decode-1", "decode-2"):
        assert UserKey.of_file(tmp_path / f"{name}.nk").public in after["nats.conf"]


@pytest.mark.parametrize("first", [(), ("--process", "decode=d1", "--process", "gateway=g1")])
def test_later_call_remembers_what_the_earlier_ones_were_given(
    first: tuple[str, ...], tmp_path: Path
) -> None:
    """Else every process that it does not name would be locked out of NATS, or off Redis."""
    make(tmp_path, *first, "--host", "10.0.0.1", "--tls", "/etc/nats/tls")
    before = texts(tmp_path)
    (tmp_path / "operator-token").unlink()
    make(tmp_path)
    after = texts(tmp_path)
    assert {name for name in after if before.get(name) != after[name]} == {"operator-token"}
    make(tmp_path, "--process", "host=h1", "--kubernetes")
    for key in (tmp_path / "h1.nk", *(tmp_path / each for each in before if each.endswith(".nk"))):
        assert UserKey.of_file(key).public in (tmp_path / "nats.conf").read_text()
    assert "@10.0.0.1:6379/0" in (tmp_path / "redis-gateway.url").read_text()


def test_process_gets_another_region(tmp_path: Path) -> None:
    for each in ("decode=d1", "decode=d1@eu"):
        make(tmp_path, "--process", each)
    assert "heartbeat.eu.d1" in (tmp_path / "nats.conf").read_text()


def test_folder_without_a_record_locks_nobody_out(tmp_path: Path) -> None:
    make(tmp_path, "--process", "decode=d1")
    (tmp_path / folder_record.FILE).unlink()
    before = texts(tmp_path)
    done = call_hearth(("credential", "--folder", str(tmp_path), "--process", "decode=d2"), {})
    assert done.returncode == 2 and "would no longer know: d1. Name all" in done.stderr
    assert texts(tmp_path) == before


@pytest.mark.parametrize("text", ["", "{}", '{"has_defaults": 1}'])
def test_damaged_record_is_one_line(text: str, tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / folder_record.FILE).write_text(text)
    done = call_hearth(("credential", "--folder", str(tmp_path)), {})
    assert done.returncode == 2
    assert folder_record.FILE in done.stderr and done.stderr.count("\n") == 1


def test_deleted_file_is_made_anew(tmp_path: Path) -> None:
    make(tmp_path)
    before = texts(tmp_path)
    (tmp_path / "redis-host.password").unlink()
    make(tmp_path)
    changed = {name for name, text in texts(tmp_path).items() if before[name] != text}
    assert changed == {"redis-host.password", "redis-host.url", "users.acl"}


def test_prometheus_has_one_value_of_a_token_that_is_rotated(tmp_path: Path) -> None:
    """It sends its whole file, and a header holds one line."""
    make(tmp_path)
    token = tmp_path / "metrics-token"
    assert (tmp_path / "prometheus-token").read_text() == token.read_text()
    (tmp_path / "prometheus-token").unlink()
    token.write_text("new\nold\n")
    secrets = yaml.safe_load_all(make(tmp_path, "--kubernetes"))
    by_name = {each["metadata"]["name"]: each["stringData"] for each in secrets}
    assert by_name["hearth-metrics"]["metrics-token"] == "new"
    assert by_name["hearth-gateway"]["metrics-token"] == "new\nold"


def test_folder_is_closed_and_containers_may_read_its_files(tmp_path: Path) -> None:
    make(tmp_path / "secrets")
    assert (tmp_path / "secrets").stat().st_mode & 0o777 == 0o700
    modes = {each.stat().st_mode & 0o777 for each in (tmp_path / "secrets").iterdir()}
    assert modes == {0o644}


def test_tls_of_nats_names_the_certificates(tmp_path: Path) -> None:
    make(tmp_path, "--tls", "/etc/nats/tls")
    assert 'cert_file: "/etc/nats/tls/server.crt"' in (tmp_path / "nats.conf").read_text()


def test_kubernetes_has_a_secret_for_each_process(tmp_path: Path) -> None:
    secrets = list(yaml.safe_load_all(make(tmp_path, "--kubernetes", "--namespace", "x")))
    by_name = {each["metadata"]["name"]: each["stringData"] for each in secrets}
    assert {each["metadata"]["namespace"] for each in secrets} == {"x"}
    for each in named_credentials(PROCESSES):
        keys = {"nats.nk", *FILES_OF_ROLE[each.role]}
        assert by_name.pop(f"hearth-{each.process_id}").keys() == keys
    assert by_name.keys() == {"hearth-nats", "hearth-redis", "hearth-metrics"}
    assert by_name["hearth-nats"]["nats.conf"] == (tmp_path / "nats.conf").read_text().strip()
    again = list(yaml.safe_load_all(make(tmp_path, "--kubernetes", "--namespace", "x")))
    assert again == secrets


def test_without_a_folder_secrets_are_printed_alone() -> None:
    done = call_hearth(("credential", "--kubernetes"), {})
    assert "hearth-redis:6379" in done.stdout and done.stderr == ""


@pytest.mark.parametrize(
    ("host", "address"),
    [("r", "r:6379"), ("r.a:1", "r.a:1"), ("::1", "[::1]:6379"), ("[::1]:9", "[::1]:9")],
)
def test_host_of_redis_may_have_a_port(host: str, address: str, tmp_path: Path) -> None:
    make(tmp_path, "--host", host)
    assert f"@{address}/0" in (tmp_path / "redis-gateway.url").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "a role, or --folder, or --kubernetes is missing"),
        (("decode", "--kubernetes"), "take no role"),
        (("--folder", "/proc/no"), "/proc/no: "),
        (("--kubernetes", "--process", "decode"), "is not ROLE=NAME"),
        (("--kubernetes", "--namespace", "a: b"), "Kubernetes takes no 'a: b'"),
        (("--kubernetes", "--process", "decode=eu_1"), "Kubernetes takes no 'hearth-eu_1'"),
        (("--kubernetes", "--host", "a b"), "'a b' is neither the name of a host"),
        (("--kubernetes", "--host", "redis:0"), "'redis:0': no such port"),
        (("--kubernetes", "--tls", 'a"b'), "nats-server takes no such path"),
    ],
)
def test_bad_arguments_are_one_line(arguments: tuple[str, ...], message: str) -> None:
    done = call_hearth(("credential", *arguments), {})
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.count("\n") == 1

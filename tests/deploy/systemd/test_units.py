"""The units of `hearth install-service`: checked by systemd, and run as they are written."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from kernels.cache import cache_root
from services.cli.deployment.service_files import COMMANDS
from services.worker.rank_service import ENDED_STATUS
from shared.transport.nkeys import UserKey
from tests.deploy.systemd.supervisor import Supervisor, read_unit
from tests.services.cli.in_process import call_hearth
from tests.support.servers import Server, find_binary, free_port
from tests.support.waiting import wait_until

WATCHDOG_S = 3.0
START_S = 300.0  # of a worker that compiles
MAX_EXPOSURE = 3.0  # of 10, as `systemd-analyze security` counts
needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)


def install(root: Path, *arguments: str) -> None:
    done = call_hearth(("install-service", *arguments, "--root", str(root)), {})
    assert done.returncode == 0, done.stderr


def unit_of(root: Path, name: str) -> Path:
    """Returns a path by which systemd finds the drop-in of the instance, too."""
    path = root / "etc/systemd/system" / f"hearth@{name}.service"
    path.symlink_to("hearth@.service")
    return path


def analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = ["systemd-analyze", "--no-pager", "--man=no", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@needs_systemd
def test_units_have_no_unknown_key(tmp_path: Path) -> None:
    for role in COMMANDS:
        install(tmp_path, role, f"{role}-1")
    install(tmp_path, "decode", "decode-gpu", "--gpu", "--tls", "/etc/hearth/tls")
    names = [*(f"{role}-1" for role in COMMANDS), "decode-gpu"]
    units = [unit_of(tmp_path, each) for each in names]
    done = analyze("verify", *units, tmp_path / "etc/systemd/system/hearth.target")
    assert (done.returncode, done.stderr) == (0, "")
    with (tmp_path / "etc/systemd/system/hearth@decode-gpu.service.d/process.conf").open(
        "a"
    ) as file:
        file.write("LoadCredentials=x:/y\n")
    assert "LoadCredentials" in analyze("verify", units[-1]).stderr


@needs_systemd
@pytest.mark.parametrize("options", [(), ("--gpu",)])
def test_exposure_of_each_unit_is_low(tmp_path: Path, options: tuple[str, ...]) -> None:
    install(tmp_path, "decode", *options)
    unit = unit_of(tmp_path, "decode")
    threshold = f"--threshold={MAX_EXPOSURE * 10:g}"
    done = analyze("security", "--offline=true", threshold, unit)
    assert done.returncode == 0, done.stdout.splitlines()[-2:]


def test_options_of_a_process_are_kept(tmp_path: Path) -> None:
    for _ in range(2):
        install(tmp_path, "decode", "decode-1")
        with (tmp_path / "etc/hearth/decode-1.env").open("a") as file:
            file.write("HEARTH_REGION=eu\n")
    assert (tmp_path / "etc/hearth/decode-1.env").read_text().count("HEARTH_REGION") == 2


def test_upgrade_of_one_process_leaves_the_others_at_their_release(tmp_path: Path) -> None:
    """One that ends meanwhile is started again: out of order if it had the new release."""
    for name, release in (("gateway", "0.1.0"), ("decode", "0.2.0")):
        install(tmp_path, name, "--executable", f"/opt/hearth-{release}/bin/hearth")
        reset, line = read_unit(tmp_path, name)["ExecStart"][-2:]
        assert (reset, line) == ("", f"/opt/hearth-{release}/bin/hearth $HEARTH_COMMAND")
    assert "0.1.0" in read_unit(tmp_path, "gateway")["ExecStart"][-1]


def test_drop_in_has_the_command_that_writes_it_again(tmp_path: Path) -> None:
    options = ("--gpu", "--tls", "/etc/tls", "--nats", "[::1]:4222", "--secrets", "/srv/secrets")
    install(tmp_path, "decode", "decode-1", *options)
    drop_in = tmp_path / "etc/systemd/system/hearth@decode-1.service.d/process.conf"
    text = drop_in.read_text()
    drop_in.unlink()
    command, install_service, *arguments = shlex.split(text.splitlines()[0].removeprefix("# "))
    assert (command, install_service) == ("hearth", "install-service")
    assert "'[::1]:4222'" in text  # to a shell it is a pattern
    install(tmp_path, *arguments)
    assert drop_in.read_text() == text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("observer",), "role 'observer' is no service"),
        (("decode", "a b"), "may have letters, digits, - and _ only"),
        (("rank",), "ranks need the credential of their worker"),
        (("scheduler", "--gpu"), "role 'scheduler' uses no GPU"),
        (("decode", "--nats", "nats://10.0.0.1:4222"), "is not HOST or HOST:PORT"),
        (("decode", "--nats", "h:4222 x"), "is not HOST or HOST:PORT"),
        (("decode", "--nats", "h:99999"), "is not HOST or HOST:PORT"),
        (("decode", "--nats", "h:b"), "is not HOST or HOST:PORT"),
        (("decode", "--secrets", "secrets"), "secrets 'secrets' is not an absolute path"),
        (("decode", "--tls", "/a b"), "tls '/a b' is not an absolute path without spaces"),
        (("decode", "--executable", "/x%y"), "executable '/x%y' is not an absolute path"),
    ],
)
def test_bad_arguments_are_one_line(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    done = call_hearth(("install-service", *arguments, "--root", str(tmp_path)), {})
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.fixture
def nats(tmp_path: Path) -> Server:
    folder = tmp_path / "secrets"
    assert call_hearth(("credential", "--folder", str(folder)), {}).returncode == 0
    port = free_port()
    command = [find_binary("nats-server"), "-c", str(folder / "nats.conf"), "-a", "127.0.0.1"]
    server = Server([*command, "-p", str(port)], port)
    yield server
    server.stop()


def supervise(
    root: Path, nats: Server, role: str, name: str | None = None, **options: str
) -> Supervisor:
    address, name = f"127.0.0.1:{nats.port}", name or role
    install(root, role, name, "--nats", address, "--secrets", str(root / "secrets"))
    lines = [f"HEARTH_{each.upper()}={value}\n" for each, value in options.items()]
    (root / f"etc/hearth/{name}.env").write_text("".join(lines))
    return Supervisor(root, name, watchdog_s=WATCHDOG_S)


@pytest.mark.parametrize(
    ("role", "options", "message"),
    [
        (
            "scheduler",
            {"metrics_port": "{port}"},
            "metrics_port: cannot listen on 127.0.0.1:{port}",
        ),
        ("decode", {"model_dir": "/nowhere"}, "model_dir /nowhere is not a directory"),
        ("scheduler", {"cluster_secret_file": "/nowhere"}, "No such file or directory"),
    ],
)
def test_bad_options_are_one_line_and_status_2(
    tmp_path: Path, nats: Server, role: str, options: dict[str, str], message: str
) -> None:
    given = {name: text.format(port=nats.port) for name, text in options.items()}
    done = supervise(tmp_path, nats, role, **given).try_once()
    assert done.returncode == 2
    assert message.format(port=nats.port) in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_wrong_key_is_one_line_and_status_2(tmp_path: Path, nats: Server) -> None:
    supervisor = supervise(tmp_path, nats, "scheduler")
    (tmp_path / "secrets/scheduler.nk").write_text(UserKey.create().seed)
    done = supervisor.try_once()
    assert done.returncode == 2
    assert "'Authorization Violation'" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def restarted_after_a_freeze(supervisor: Supervisor) -> None:
    with supervisor:
        wait_until(lambda: supervisor.pids, timeout_s=START_S, seen=lambda: supervisor.states)
        frozen = supervisor.pids[0]
        os.kill(frozen, signal.SIGSTOP)
        wait_until(
            lambda: len(supervisor.pids) == 2, timeout_s=START_S, seen=lambda: supervisor.states
        )
    assert supervisor.pids[1] != frozen
    assert supervisor.statuses == [-signal.SIGKILL, 0]
    assert supervisor.states[-1] == "STOPPING=1"


def test_frozen_process_is_restarted_by_its_watchdog(tmp_path: Path, nats: Server) -> None:
    restarted_after_a_freeze(supervise(tmp_path, nats, "scheduler"))


@pytest.mark.long
def test_frozen_worker_is_restarted_by_its_watchdog(tmp_path: Path, nats: Server) -> None:
    restarted_after_a_freeze(supervise(tmp_path, nats, "decode", cache_dir=str(cache_root())))


@pytest.mark.long
def test_ranks_of_two_hosts_are_restarted_together(tmp_path: Path, nats: Server) -> None:
    """A frozen process of ranks is killed by its watchdog, and its worker starts anew, too."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "secrets").symlink_to(tmp_path / "secrets")
    group = {"instance": "-", "pp": "2", "remote_ranks": "1"}
    worker = supervise(tmp_path, nats, "decode", **group, cache_dir=str(cache_root()))
    ranks = supervise(other, nats, "rank", "decode", cache_dir=str(cache_root()))
    units = worker, ranks
    with worker, ranks:
        wait_until(lambda: worker.pids and ranks.pids, timeout_s=START_S)
        os.kill(ranks.pids[0], signal.SIGSTOP)
        wait_until(lambda: all(len(each.pids) > 1 for each in units), timeout_s=START_S)
    assert ranks.statuses[0] == -signal.SIGKILL
    assert worker.statuses[0] == ENDED_STATUS

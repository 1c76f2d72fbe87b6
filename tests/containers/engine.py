"""Docker or podman of this machine, and the compose that belongs to it."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROJECT = "hearth-try"
NEEDED = (
    "docker with `docker compose`, or: apt-get install podman runc netavark aardvark-dns iptables"
)
LIMIT_S = 900.0
CHECK_EVERY_S = 2.0
MAX_PROCESSES = 32768  # podman's default is above what a process without CAP_SYS_RESOURCE may ask
HAS_SYSTEMD = Path("/run/systemd/system").exists()


class Engine:
    """Runs containers. `environ` is what compose interpolates, and what the engine needs."""

    def __init__(self, command: list[str], compose: list[str], environ: dict[str, str]) -> None:
        self.command, self.environ = command, environ
        self._compose = compose

    @property
    def is_podman(self) -> bool:
        return self.command[0].endswith("podman")

    def run(self, *arguments: str | Path, is_checked: bool = True, text: str | None = None) -> str:
        return self._call([*self.command, *map(str, arguments)], is_checked, text)

    def compose(self, *arguments: str, is_checked: bool = True) -> str:
        command = [*self._compose, "--project-name", PROJECT, "--profile", "cpu", *arguments]
        return self._call(command, is_checked)

    def run_tool(self, service: str, *arguments: str, is_checked: bool = True) -> str:
        """Runs a command in a container of the profile `tools`."""
        run = ("--profile", "tools", "run", "--rm", "--no-deps", "-T", service)
        return self.compose(*run, *arguments, is_checked=is_checked)

    def has_image(self, name: str) -> bool:
        done = subprocess.run(
            [*self.command, "image", "inspect", name], env=self.environ, capture_output=True
        )
        return done.returncode == 0

    def containers(self, service: str = "") -> list[str]:
        """Returns the running containers of the project, or of one service."""
        label = "com.docker.compose"
        filters = [f"--filter=label={label}.project={PROJECT}"]
        filters += [f"--filter=label={label}.service={service}"] if service else []
        return self.run("ps", "--format={{.Names}}", *filters).split()

    def inspect(self, container: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.run("inspect", container))[0]
        return found

    def _call(self, command: list[str], is_checked: bool, text: str | None = None) -> str:
        done = subprocess.run(
            command,
            env=self.environ,
            cwd=ROOT,
            input=text,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        if is_checked and done.returncode:
            shown = f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
            raise RuntimeError(f"{' '.join(command)}: exit status {done.returncode}\n{shown}")
        return done.stdout


def find_engine(state: Path, environ: dict[str, str]) -> Engine:
    """Returns docker if its engine answers, else podman with storage below `state`."""
    environ = {**os.environ, **environ}
    if _succeeds(["docker", "info"]) and _succeeds(["docker", "compose", "version"]):
        return Engine(["docker"], ["docker", "compose"], environ)
    if shutil.which("podman") is None:
        sys.exit(f"try_compose: no engine for containers: {NEEDED}")
    environ |= _podman_settings(state)
    return Engine(["podman"], [sys.executable, "-m", "podman_compose"], environ)


def _succeeds(command: list[str]) -> bool:
    found = shutil.which(command[0]) is not None
    return found and subprocess.run(command, capture_output=True).returncode == 0


def _podman_settings(state: Path) -> dict[str, str]:
    """Writes podman's configuration for machines without systemd and registries. Images stay for
    the next call.
    """
    state.mkdir(parents=True, exist_ok=True)
    limits = ", ".join(f'"{each}"' for each in own_limits())
    runtime = 'runtime = "runc"\n' if shutil.which("runc") else ""
    (state / "containers.conf").write_text(
        f"[containers]\ndefault_ulimits = [{limits}]\n"
        f'[engine]\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n{runtime}'
        '[network]\nnetwork_backend = "netavark"\n'
    )
    has_overlay = "\toverlay\n" in Path("/proc/filesystems").read_text()
    driver = os.environ.get("STORAGE_DRIVER", "overlay" if has_overlay else "vfs")
    (state / "storage.conf").write_text(
        f'[storage]\ndriver = "{driver}"\nrunroot = "{state}/run"\ngraphroot = "{state}/images"\n'
    )
    (state / "registries.conf").write_text('short-name-mode = "disabled"\n')
    return {
        "CONTAINERS_CONF": str(state / "containers.conf"),
        "CONTAINERS_STORAGE_CONF": str(state / "storage.conf"),
        "CONTAINERS_REGISTRIES_CONF": str(state / "registries.conf"),
        "STORAGE_DRIVER": driver,
        "BUILDAH_FORMAT": "docker",  # OCI's has no HEALTHCHECK
    }


def own_limits() -> list[str]:
    """Returns the limits of this process, which containers may not raise, as podman writes them."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    processes = MAX_PROCESSES if processes < 0 else min(processes, MAX_PROCESSES)
    return [f"nofile={files}:{files}", f"nproc={processes}:{processes}"]


@contextlib.contextmanager
def without_systemd(engine: Engine) -> Iterator[None]:
    """Does for podman what systemd does elsewhere: timers of health checks, and a reader of
    /dev/log, without which names of containers do not resolve.
    """
    if not engine.is_podman or HAS_SYSTEMD:
        yield
        return
    is_over = threading.Event()
    thread = threading.Thread(target=_check_health, args=(engine, is_over), daemon=True)
    thread.start()
    try:
        with _dev_log():
            yield
    finally:
        is_over.set()
        thread.join()


def _check_health(engine: Engine, is_over: threading.Event) -> None:
    while not is_over.wait(CHECK_EVERY_S):
        for name in engine.run("ps", "--format={{.Names}}", is_checked=False).split():
            engine.run("healthcheck", "run", name, is_checked=False)


@contextlib.contextmanager
def _dev_log() -> Iterator[None]:
    path = Path("/dev/log")
    if path.exists():
        yield
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
        log.bind(str(path))
        log.settimeout(0.5)
        is_over = threading.Event()

        def read() -> None:
            while not is_over.is_set():
                with contextlib.suppress(TimeoutError):
                    log.recv(65536)

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
            path.unlink()
